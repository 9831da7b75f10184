#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/concat.h"
#include "base/try.h"
#include "io/input_file.h"
#include "io/output_file.h"
#include "model/hash.h"
#include "model/key_blocks.h"
#include "model/session_impl.h"

// The prompt cache file, little endian: Header, token ids (int32), then for each layer and KV head
// the keys [position, head_dim] and the values [position, head_dim]. docs/forward.md describes it.
namespace qmlp {
namespace {

constexpr char kMagic[8] = {'Q', 'M', 'L', 'P', 'K', 'V', '\r', '\n'};
constexpr std::uint32_t kVersion = 1;

struct Header {
  char magic[8];
  std::uint32_t version;
  std::uint32_t dtype;
  std::uint64_t fingerprint;  // Model::Impl::fingerprint
  std::uint64_t num_layers;
  std::uint64_t num_kv_heads;
  std::uint64_t head_dim;
  std::uint64_t num_tokens;
  std::uint64_t checksum;  // of the header with this field 0, and of all that follows
};
static_assert(sizeof(Header) == 64);

std::span<const std::byte> header_bytes(const Header& header) {
  return std::as_bytes(std::span(&header, 1));
}

// The rows of one head's keys (part 0) or values (part 1), to or from `rows`.
void copy_head(const KvCache& cache, std::int64_t layer, std::int64_t head, int part,
               std::int64_t positions, std::byte* rows, bool to_rows) {
  const auto element = static_cast<std::int64_t>(cache.element_bytes);
  if (part == 0) {
    auto* keys = const_cast<std::byte*>(cache.keys(layer)) + head * cache.k_head_stride * element;
    if (element == 4) {
      copy_keys(reinterpret_cast<std::uint32_t*>(keys), reinterpret_cast<std::uint32_t*>(rows),
                positions, cache.head_dim, to_rows);
    } else {
      copy_keys(reinterpret_cast<std::uint16_t*>(keys), reinterpret_cast<std::uint16_t*>(rows),
                positions, cache.head_dim, to_rows);
    }
    return;
  }
  auto* values = const_cast<std::byte*>(cache.values(layer)) + head * cache.v_head_stride * element;
  const auto row_bytes = static_cast<std::size_t>(cache.head_dim * element);
  for (std::int64_t p = 0; p < positions; ++p) {
    std::byte* in_cache = values + p * cache.v_row_stride * element;
    std::byte* row = rows + p * cache.head_dim * element;
    std::memcpy(to_rows ? row : in_cache, to_rows ? in_cache : row, row_bytes);
  }
}

void hash_header(const Header& header, Hash64& hash) {
  Header copy = header;
  copy.checksum = 0;
  hash.update(&copy, sizeof(copy));
}

Header make_header(const Model::Impl& model, const KvCache& cache, std::int64_t position) {
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.version = kVersion;
  header.dtype = static_cast<std::uint32_t>(model.activations);
  header.fingerprint = model.fingerprint;
  header.num_layers = static_cast<std::uint64_t>(cache.num_layers);
  header.num_kv_heads = static_cast<std::uint64_t>(cache.num_kv_heads);
  header.head_dim = static_cast<std::uint64_t>(cache.head_dim);
  header.num_tokens = static_cast<std::uint64_t>(position);
  return header;
}

Status check_header(const std::string& path, const Header& header, const Model::Impl& model,
                    const KvCache& cache, std::int64_t max_tokens, std::uint64_t file_bytes) {
  const auto corrupt = [&](std::string_view why) -> Status {
    return Error{Errc::corrupt_file, concat(path, ": ", why)};
  };
  const auto mismatch = [&](std::string_view why) -> Status {
    return Error{Errc::invalid_argument, concat(path, ": ", why)};
  };
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0) {
    return corrupt("is not a qmlp prompt cache");
  }
  if (header.version != kVersion) {
    return corrupt(
        concat("has format version ", header.version, ", this program reads ", kVersion));
  }
  if (header.dtype > static_cast<std::uint32_t>(DType::bf16)) {
    return corrupt(concat("names an unknown type, ", header.dtype));
  }
  const auto dtype = static_cast<DType>(header.dtype);
  if (dtype != model.activations) {
    return mismatch(concat("was made with ", to_string(dtype), " activations, this session has ",
                           to_string(model.activations)));
  }
  if (header.num_layers != static_cast<std::uint64_t>(cache.num_layers) ||
      header.num_kv_heads != static_cast<std::uint64_t>(cache.num_kv_heads) ||
      header.head_dim != static_cast<std::uint64_t>(cache.head_dim)) {
    return mismatch(concat("has ", header.num_layers, " layers of ", header.num_kv_heads, " x ",
                           header.head_dim, ", this model has ", cache.num_layers, " of ",
                           cache.num_kv_heads, " x ", cache.head_dim));
  }
  if (header.fingerprint != model.fingerprint) {
    return mismatch(
        "was made by another model, or with another precision or accumulation, than this "
        "session's");
  }
  if (header.num_tokens > static_cast<std::uint64_t>(max_tokens)) {
    return mismatch(
        concat("holds ", header.num_tokens, " tokens, this session has room for ", max_tokens));
  }
  // At most max_tokens of them, whose cache fits in memory: nothing here can overflow.
  const std::uint64_t token_bytes =
      sizeof(std::int32_t) +
      2 * header.num_layers * header.num_kv_heads * header.head_dim * cache.element_bytes;
  const std::uint64_t expected = sizeof(Header) + header.num_tokens * token_bytes;
  if (file_bytes != expected) {
    return corrupt(concat(file_bytes < expected ? "is truncated" : "is too long", ": holds ",
                          file_bytes, " bytes, its ", header.num_tokens, " tokens need ",
                          expected));
  }
  return {};
}

}  // namespace

Status Session::Impl::save(const std::string& path) const {
  QMLP_ASSIGN(OutputFile file, OutputFile::create(path));
  Header header = make_header(impl(), cache, position);
  Hash64 hash;
  hash_header(header, hash);
  const auto append = [&file, &hash](std::span<const std::byte> bytes) {
    hash.update(bytes.data(), bytes.size());
    return file.write(bytes);
  };
  QMLP_TRY(file.write(header_bytes(header)));
  QMLP_TRY(append(std::as_bytes(std::span(tokens))));
  std::vector<std::byte> rows(static_cast<std::size_t>(position * cache.head_dim) *
                              cache.element_bytes);
  for (std::int64_t layer = 0; layer < cache.num_layers; ++layer) {
    for (std::int64_t head = 0; head < cache.num_kv_heads; ++head) {
      for (int part = 0; part < 2; ++part) {
        copy_head(cache, layer, head, part, position, rows.data(), true);
        QMLP_TRY(append(rows));
      }
    }
  }
  header.checksum = hash.value();
  QMLP_TRY(file.rewind());
  QMLP_TRY(file.write(header_bytes(header)));
  return file.commit();
}

Status Session::Impl::load(const std::string& path) {
  QMLP_ASSIGN(const InputFile file, InputFile::open(path));
  Header header{};
  if (file.size < sizeof(header)) {
    return Error{Errc::corrupt_file, concat(path, ": is truncated: holds ", file.size,
                                            " bytes, the header alone needs ", sizeof(header))};
  }
  QMLP_TRY(file.read(0, std::as_writable_bytes(std::span(&header, 1))));
  QMLP_TRY(check_header(path, header, impl(), cache, max_tokens, file.size));

  const auto count = static_cast<std::int64_t>(header.num_tokens);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(count));
  std::vector<std::byte> rows(static_cast<std::size_t>(count * cache.head_dim) *
                              cache.element_bytes);
  // Twice over the file: a damaged one is refused before the cache changes.
  for (const bool keep : {false, true}) {
    if (keep) {
      position = 0;
      tokens.clear();
    }
    Hash64 hash;
    hash_header(header, hash);
    std::uint64_t offset = sizeof(header);
    const auto next = [&file, &hash, &offset](std::span<std::byte> bytes) -> Status {
      QMLP_TRY(file.read(offset, bytes));
      hash.update(bytes.data(), bytes.size());
      offset += bytes.size();
      return {};
    };
    QMLP_TRY(next(std::as_writable_bytes(std::span(ids))));
    for (std::int64_t layer = 0; layer < cache.num_layers; ++layer) {
      for (std::int64_t head = 0; head < cache.num_kv_heads; ++head) {
        for (int part = 0; part < 2; ++part) {
          QMLP_TRY(next(rows));
          if (keep) copy_head(cache, layer, head, part, count, rows.data(), false);
        }
      }
    }
    if (hash.value() != header.checksum) {
      return Error{Errc::corrupt_file, concat(path, ": is damaged: its checksum does not match")};
    }
    const auto vocab = impl().config.vocab_size;
    for (const std::int32_t id : ids) {
      if (id < 0 || id >= vocab) {
        return Error{Errc::corrupt_file,
                     concat(path, ": token id ", id, " is outside the vocabulary of ", vocab)};
      }
    }
  }
  tokens.assign(ids.begin(), ids.end());
  position = count;
  return {};
}

}  // namespace qmlp
