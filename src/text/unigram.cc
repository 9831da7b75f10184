#include "text/unigram.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "base/concat.h"
#include "text/quote.h"
#include "text/utf8.h"

namespace qmlp::text {
namespace {

constexpr std::uint64_t kEmpty = ~std::uint64_t{0};
constexpr double kUnknownPenalty = 10.0;  // SentencePiece's
// Bounds the time of one character; published vocabularies stay below 300.
constexpr std::size_t kLongestToken = 4096;

constexpr std::uint64_t slot_key(std::int32_t node, char byte) {
  return (std::uint64_t{static_cast<std::uint32_t>(node)} << 8) | static_cast<unsigned char>(byte);
}
constexpr std::uint64_t hash(std::uint64_t key) { return (key ^ (key >> 29)) * 0x9E3779B97F4A7C15; }

}  // namespace

Result<Unigram> Unigram::build(const Parts& parts) {
  Unigram out;
  out.unknown_id_ = parts.unknown_id;
  std::copy(std::begin(parts.byte_ids), std::end(parts.byte_ids), std::begin(out.byte_ids_));
  double lowest = std::numeric_limits<double>::infinity();
  std::size_t bytes = 1;
  for (const Token& token : parts.tokens) {
    if (!std::isfinite(token.score)) {
      return Error{Errc::corrupt_file,
                   concat("token ", quote(token.text), ": its score is not finite")};
    }
    if (token.text.size() > kLongestToken) {
      return Error{Errc::unsupported,
                   concat("token ", quote(token.text), " holds ", token.text.size(),
                          " bytes, at most ", kLongestToken, " are supported")};
    }
    lowest = std::min(lowest, token.score);
    bytes += token.text.size();
  }
  if (bytes > std::size_t{1} << 28) {
    return Error{Errc::unsupported, concat("the vocabulary's tokens hold ", bytes, " bytes")};
  }
  out.unknown_score_ = lowest - kUnknownPenalty;
  // Room for a node for every byte of every token; most share theirs.
  const std::size_t capacity = std::bit_ceil(bytes * 2);
  out.shift_ = 64 - std::countr_zero(capacity);
  out.slots_.assign(capacity, Slot{kEmpty, kNone});
  out.ids_.push_back(kNone);
  out.scores_.push_back(0.0);
  for (const Token& token : parts.tokens) {
    if (!token.usable || token.text.empty()) continue;
    std::int32_t node = 0;
    for (const char c : token.text) {
      const std::uint64_t key = slot_key(node, c);
      std::size_t at = hash(key) >> out.shift_;
      while (out.slots_[at].key != kEmpty && out.slots_[at].key != key) {
        at = (at + 1) & (capacity - 1);
      }
      if (out.slots_[at].key == kEmpty) {
        out.slots_[at] = {key, static_cast<std::int32_t>(out.ids_.size())};
        out.ids_.push_back(kNone);
        out.scores_.push_back(0.0);
      }
      node = out.slots_[at].node;
    }
    out.ids_[static_cast<std::size_t>(node)] = token.id;
    out.scores_[static_cast<std::size_t>(node)] = token.score;
  }
  return out;
}

std::int32_t Unigram::child(std::int32_t node, char byte) const noexcept {
  const std::uint64_t key = slot_key(node, byte);
  std::size_t at = hash(key) >> shift_;
  while (slots_[at].key != key) {
    if (slots_[at].key == kEmpty) return kNone;
    at = (at + 1) & (slots_.size() - 1);
  }
  return slots_[at].node;
}

void Unigram::add_unknown(std::string_view text, std::vector<std::int32_t>& reversed) const {
  std::int32_t node = 0;
  for (std::size_t i = 0; i < text.size() && node != kNone; ++i) node = child(node, text[i]);
  if (node != kNone && ids_[static_cast<std::size_t>(node)] != kNone) {
    // A run of unknown characters may spell a token that scores worse than they do.
    reversed.push_back(ids_[static_cast<std::size_t>(node)]);
    return;
  }
  const auto byte_id = [this](char c) { return byte_ids_[static_cast<unsigned char>(c)]; };
  if (std::all_of(text.begin(), text.end(), [&](char c) { return byte_id(c) != kNone; })) {
    for (auto c = text.rbegin(); c != text.rend(); ++c) reversed.push_back(byte_id(*c));
    return;
  }
  reversed.push_back(unknown_id_);
}

void Unigram::encode_word(std::string_view word, Scratch& scratch,
                          std::vector<std::int32_t>& out) const {
  auto& nodes = scratch.nodes_;
  nodes.assign(word.size() + 1, {0.0, kNone, kNone});
  const auto offer = [&nodes](std::size_t end, double score, std::size_t begin, std::int32_t id) {
    Scratch::Node& node = nodes[end];
    if (node.begin == kNone || score > node.score) {
      node = {score, static_cast<std::int32_t>(begin), id};
    }
  };
  for (std::size_t begin = 0; begin < word.size();) {
    const std::size_t character = first_utf8_unit(word.substr(begin)).length;
    const double score = nodes[begin].score;
    bool single = false;
    std::int32_t node = 0;
    for (std::size_t at = begin; at < word.size(); ++at) {
      node = child(node, word[at]);
      if (node == kNone) break;
      const std::int32_t id = ids_[static_cast<std::size_t>(node)];
      if (id == kNone) continue;
      offer(at + 1, score + scores_[static_cast<std::size_t>(node)], begin, id);
      single = single || at + 1 == begin + character;
    }
    if (!single) offer(begin + character, score + unknown_score_, begin, unknown_id_);
    begin += character;
  }
  auto& reversed = scratch.reversed_;
  reversed.clear();
  // One token, or its bytes, for a run of unknown characters.
  std::size_t unknown_end = 0;
  for (std::size_t end = word.size(); end > 0;) {
    const Scratch::Node& node = nodes[end];
    const auto begin = static_cast<std::size_t>(node.begin);
    if (node.id == unknown_id_) {
      if (unknown_end == 0) unknown_end = end;
      if (begin == 0 || nodes[begin].id != unknown_id_) {
        add_unknown(word.substr(begin, unknown_end - begin), reversed);
        unknown_end = 0;
      }
    } else {
      reversed.push_back(node.id);
    }
    end = begin;
  }
  out.insert(out.end(), reversed.rbegin(), reversed.rend());
}

}  // namespace qmlp::text
