#include "text/bpe.h"

#include <algorithm>
#include <bit>
#include <cstddef>

#include "text/utf8.h"

namespace qmlp::text {
namespace {

constexpr std::uint64_t kEmpty = ~std::uint64_t{0};
constexpr std::uint32_t kNoRank = UINT32_MAX;
constexpr char32_t kNoCharacter = UINT32_MAX;
constexpr std::string_view kWordStart = "\u2581";

// Up to this length a scan over all pairs is faster than a queue.
constexpr std::size_t kShortWord = 64;

constexpr std::uint64_t pair_key(std::int32_t left, std::int32_t right) {
  return (std::uint64_t{static_cast<std::uint32_t>(left)} << 32) |
         static_cast<std::uint32_t>(right);
}

// Fibonacci hashing: the high bits of the product are well mixed.
constexpr std::uint64_t hash(std::uint64_t key) { return (key ^ (key >> 29)) * 0x9E3779B97F4A7C15; }

}  // namespace

Bpe::Bpe(const Parts& parts)
    : of_characters_(parts.of_characters),
      words_apart_(parts.words_apart),
      unknown_id_(parts.unknown_id),
      fuse_unknown_(parts.fuse_unknown) {
  std::copy(std::begin(parts.byte_ids), std::end(parts.byte_ids), std::begin(byte_ids_));
  const std::size_t capacity = std::bit_ceil(std::max<std::size_t>(2, parts.merges.size() * 3 / 2));
  shift_ = 64 - std::countr_zero(capacity);
  slots_.assign(capacity, Slot{kEmpty, 0, kNone});
  for (std::size_t i = 0; i < parts.merges.size(); ++i) {
    const Merge& merge = parts.merges[i];
    const std::uint32_t rank = parts.ranks.empty() ? static_cast<std::uint32_t>(i) : parts.ranks[i];
    const std::uint64_t key = pair_key(merge.left, merge.right);
    std::size_t at = hash(key) >> shift_;
    while (slots_[at].pair != kEmpty && slots_[at].pair != key) at = (at + 1) & (capacity - 1);
    slots_[at] = {key, rank, merge.result};
  }
  const std::size_t places = std::bit_ceil(std::max<std::size_t>(2, parts.characters.size() * 2));
  character_shift_ = 64 - std::countr_zero(places);
  characters_.assign(places, CharacterSlot{kNoCharacter, kNone});
  for (const auto& [code, id] : parts.characters) {
    std::size_t at = hash(code) >> character_shift_;
    while (characters_[at].code != kNoCharacter && characters_[at].code != code) {
      at = (at + 1) & (places - 1);
    }
    characters_[at] = {code, id};
  }
}

const Bpe::Slot* Bpe::find(std::int32_t left, std::int32_t right) const noexcept {
  const std::uint64_t key = pair_key(left, right);
  std::size_t at = hash(key) >> shift_;
  while (slots_[at].pair != key) {
    if (slots_[at].pair == kEmpty) return nullptr;
    at = (at + 1) & (slots_.size() - 1);
  }
  return &slots_[at];
}

std::int32_t Bpe::find_character(char32_t code) const noexcept {
  std::size_t at = hash(code) >> character_shift_;
  while (characters_[at].code != code) {
    if (characters_[at].code == kNoCharacter) return kNone;
    at = (at + 1) & (characters_.size() - 1);
  }
  return characters_[at].id;
}

void Bpe::start_bytes(std::string_view word, std::vector<std::int32_t>& ids) const {
  bool after_unknown = false;
  for (const char c : word) {
    const std::int32_t id = byte_ids_[static_cast<unsigned char>(c)];
    if (id != kNone) {
      ids.push_back(id);
      after_unknown = false;
    } else if (unknown_id_ != kNone && !(after_unknown && fuse_unknown_)) {
      ids.push_back(unknown_id_);
      after_unknown = true;
    }
  }
}

void Bpe::start_characters(std::string_view word, std::vector<std::int32_t>& ids) const {
  // As in Hugging Face's tokenizers an unknown character is held back until a known one comes:
  // bytes that follow it overtake it.
  bool pending = false;
  while (!word.empty()) {
    const Utf8Unit unit = first_utf8_unit(word);
    const std::string_view bytes = word.substr(0, unit.length);
    word.remove_prefix(unit.length);
    const std::int32_t id = find_character(unit.code);
    if (id != kNone) {
      if (pending) ids.push_back(unknown_id_);
      pending = false;
      ids.push_back(id);
      continue;
    }
    const auto byte_id = [this](char c) { return byte_ids_[static_cast<unsigned char>(c)]; };
    if (std::all_of(bytes.begin(), bytes.end(), [&](char c) { return byte_id(c) != kNone; })) {
      for (const char c : bytes) ids.push_back(byte_id(c));
      continue;
    }
    if (unknown_id_ == kNone) continue;
    if (pending && !fuse_unknown_) ids.push_back(unknown_id_);
    pending = true;
  }
  if (pending) ids.push_back(unknown_id_);
}

void Bpe::encode_word(std::string_view word, Scratch& scratch,
                      std::vector<std::int32_t>& out) const {
  if (words_apart_) {
    // Cuts where no merge reaches across: short parts take no queue.
    std::size_t from = 0;
    for (std::size_t at = word.find(kWordStart, from); at != std::string_view::npos;
         at = word.find(kWordStart, at + kWordStart.size())) {
      const std::string_view before = word.substr(from, at - from);
      if (before.empty() || before.ends_with(kWordStart)) continue;
      encode_part(before, scratch, out);
      from = at;
    }
    word.remove_prefix(from);
  }
  encode_part(word, scratch, out);
}

void Bpe::encode_part(std::string_view word, Scratch& scratch,
                      std::vector<std::int32_t>& out) const {
  scratch.ids_.clear();
  if (of_characters_) {
    start_characters(word, scratch.ids_);
  } else {
    start_bytes(word, scratch.ids_);
  }
  if (scratch.ids_.size() > kShortWord) {
    merge_long(scratch);
  } else if (scratch.ids_.size() > 1) {
    merge_short(scratch);
  }
  out.insert(out.end(), scratch.ids_.begin(), scratch.ids_.end());
}

void Bpe::merge_short(Scratch& scratch) const {
  std::vector<std::int32_t>& ids = scratch.ids_;
  std::uint32_t ranks[kShortWord];  // of the pair that starts at each symbol
  std::int32_t results[kShortWord];
  std::size_t count = ids.size();
  const auto look_up = [&](std::size_t i) {
    const Slot* slot = find(ids[i], ids[i + 1]);
    ranks[i] = slot != nullptr ? slot->rank : kNoRank;
    results[i] = slot != nullptr ? slot->result : kNone;
  };
  for (std::size_t i = 0; i + 1 < count; ++i) look_up(i);
  while (count > 1) {
    std::size_t best = 0;
    for (std::size_t i = 1; i + 1 < count; ++i) {
      if (ranks[i] < ranks[best]) best = i;
    }
    if (ranks[best] == kNoRank) break;
    ids[best] = results[best];
    for (std::size_t i = best + 1; i + 1 < count; ++i) {
      ids[i] = ids[i + 1];
      ranks[i] = ranks[i + 1];
      results[i] = results[i + 1];
    }
    --count;
    if (best > 0) look_up(best - 1);
    if (best + 1 < count) look_up(best);
  }
  ids.resize(count);
}

void Bpe::merge_long(Scratch& scratch) const {
  using Candidate = Scratch::Candidate;
  auto& symbols = scratch.symbols_;
  auto& queue = scratch.queue_;
  const auto count = static_cast<std::int32_t>(scratch.ids_.size());
  symbols.resize(scratch.ids_.size());
  queue.clear();
  for (std::int32_t i = 0; i < count; ++i) {
    symbols[static_cast<std::size_t>(i)] = {scratch.ids_[static_cast<std::size_t>(i)], i - 1,
                                            i + 1 < count ? i + 1 : kNone};
  }
  const auto symbol = [&](std::int32_t at) -> Scratch::Symbol& {
    return symbols[static_cast<std::size_t>(at)];
  };
  // The heap's top is the best rank, the leftmost of equals.
  const auto later = [](const Candidate& a, const Candidate& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.at > b.at;
  };
  const auto candidate = [&](std::int32_t at) {
    const std::int32_t next = symbol(at).next;
    const Slot* slot = next != kNone ? find(symbol(at).id, symbol(next).id) : nullptr;
    if (slot == nullptr) return false;
    queue.push_back({slot->rank, at, symbol(at).id, symbol(next).id});
    return true;
  };
  const auto push = [&](std::int32_t at) {
    if (candidate(at)) std::push_heap(queue.begin(), queue.end(), later);
  };
  for (std::int32_t i = 0; i + 1 < count; ++i) candidate(i);
  std::make_heap(queue.begin(), queue.end(), later);
  while (!queue.empty()) {
    const Candidate top = queue.front();
    std::pop_heap(queue.begin(), queue.end(), later);
    queue.pop_back();
    Scratch::Symbol& left = symbol(top.at);
    // Stale when either side has been merged since; a symbol that was absorbed has no id.
    if (left.id != top.left || left.next == kNone) continue;
    Scratch::Symbol& right = symbol(left.next);
    if (right.id != top.right) continue;
    left.id = find(top.left, top.right)->result;
    right.id = kNone;
    left.next = right.next;
    if (left.next != kNone) symbol(left.next).previous = top.at;
    if (left.previous != kNone) push(left.previous);
    push(top.at);
  }
  scratch.ids_.clear();
  for (std::int32_t at = 0; at != kNone; at = symbol(at).next)
    scratch.ids_.push_back(symbol(at).id);
}

}  // namespace qmlp::text
