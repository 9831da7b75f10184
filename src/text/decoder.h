#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "qmlp/status.h"
#include "text/file_reader.h"

namespace qmlp::text {

// Turns token texts into the bytes that they stand for, as a tokenizer.json's decoder says.
class Decoder {
 public:
  // The bytes of one token. `first`: it is the first of a text. `added`: an added token, which a
  // byte-level decoder takes as it stands.
  std::string bytes(std::string_view token, bool added, bool first) const;

  // What a text loses at its start, once all its bytes are joined.
  struct Strip {
    char character = ' ';
    std::size_t count = 0;  // at most
  };
  const Strip& strip() const noexcept { return strip_; }

 private:
  friend class DecoderSteps;

  bool byte_level_ = false;     // all else is for the other kind
  bool byte_fallback_ = false;  // <0xE2> is a byte
  std::vector<std::pair<std::string, std::string>> replacements_;
  std::string mark_;              // of a Metaspace decoder: stands for a space; empty for none
  bool drop_first_mark_ = false;  // in the first token it stands for nothing
  Strip strip_;
};

// Removes up to what is left of `strip` from the start of the next part of a text.
void take_strip(Decoder::Strip& left, std::string& text);

// The byte that a token such as <0xE2> stands for.
std::optional<unsigned char> fallback_byte(std::string_view token) noexcept;

// Reads the member "decoder". What is not understood is refused by name.
Result<Decoder> read_decoder(const FileReader& reader, const Json* value);

}  // namespace qmlp::text
