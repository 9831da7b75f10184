#include "text/post_processor.h"

#include <vector>

#include "base/concat.h"
#include "base/try.h"
#include "text/quote.h"
#include "text/tokenizer_file.h"

namespace qmlp::text {
namespace {

class Steps {
 public:
  Steps(const FileReader& reader, TokenizerFile& out) : reader_(reader), out_(out) {}

  Status read(const Json& value, int depth) {
    if (value.object() == nullptr) {
      return reader_.corrupt(
          concat("post_processor: a step is ", value.kind_name(), ", an object is required"));
    }
    QMLP_ASSIGN(const std::string type, reader_.string(value, "post_processor", "type", ""));
    if (type == "ByteLevel") return {};  // changes offsets alone
    if (type == "TemplateProcessing") return template_processing(value);
    if (type == "Sequence") {
      if (depth == 8) return reader_.unsupported("post_processor: Sequences are nested too deep");
      QMLP_ASSIGN(const JsonArray* list, reader_.array(value, "post_processor", "processors"));
      for (const Json& element : *list) QMLP_TRY(read(element, depth + 1));
      return {};
    }
    return reader_.unsupported(concat("post_processor ", quote(type), " is not supported"));
  }

 private:
  // Of the template for one text: special tokens before and after the sequence A.
  Status template_processing(const Json& value) {
    QMLP_ASSIGN(const JsonArray* single, reader_.array(value, "TemplateProcessing", "single"));
    std::vector<std::int32_t> before;
    std::vector<std::int32_t> after;
    bool seen = false;
    for (std::size_t i = 0; i < single->size(); ++i) {
      const Json& part = (*single)[i];
      const Json* token = part.find("SpecialToken");
      if (token != nullptr) {
        QMLP_TRY(add_tokens(value, *token, seen ? after : before));
        continue;
      }
      const Json* sequence = part.find("Sequence");
      const Json* id = sequence != nullptr ? sequence->find("id") : nullptr;
      if (id == nullptr || id->string() == nullptr || *id->string() != "A" || seen) {
        return reader_.unsupported(concat("TemplateProcessing.single[", i,
                                          "] is neither a SpecialToken nor the Sequence A"));
      }
      seen = true;
    }
    if (!seen) return reader_.unsupported("TemplateProcessing.single has no Sequence A");
    // The last of several steps is the outermost.
    out_.before.insert(out_.before.begin(), before.begin(), before.end());
    out_.after.insert(out_.after.end(), after.begin(), after.end());
    return {};
  }

  Status add_tokens(const Json& value, const Json& token, std::vector<std::int32_t>& out) const {
    const Json* name = token.find("id");
    if (name == nullptr || name->string() == nullptr) {
      return reader_.corrupt("TemplateProcessing: a SpecialToken has no text 'id'");
    }
    const Json* known = value.find("special_tokens");
    const Json* entry = known != nullptr ? known->find(*name->string()) : nullptr;
    if (entry == nullptr) {
      return reader_.corrupt(
          concat("TemplateProcessing.special_tokens has no ", quote(*name->string())));
    }
    QMLP_ASSIGN(const JsonArray* ids,
                reader_.array(*entry, "TemplateProcessing.special_tokens", "ids"));
    for (const Json& id : *ids) {
      const auto number = id.integer();
      if (!number || *number < 0 || *number >= Vocabulary::kMaxSize ||
          !out_.vocabulary.contains(static_cast<std::int32_t>(*number))) {
        return reader_.corrupt(concat("TemplateProcessing.special_tokens: an id of ",
                                      quote(*name->string()), " is no token of the vocabulary"));
      }
      out.push_back(static_cast<std::int32_t>(*number));
    }
    return {};
  }

  const FileReader& reader_;
  TokenizerFile& out_;
};

}  // namespace

Status read_post_processor(const FileReader& reader, const Json* value, TokenizerFile& out) {
  if (value == nullptr || value->is_null()) return {};
  out.has_post_processor = true;
  return Steps(reader, out).read(*value, 0);
}

}  // namespace qmlp::text
