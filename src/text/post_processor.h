#pragma once

#include "qmlp/status.h"
#include "text/file_reader.h"

namespace qmlp::text {

struct TokenizerFile;

// Reads the member "post_processor", which may be null, into `out.before` and `out.after`. What is
// not understood is refused by name.
Status read_post_processor(const FileReader& reader, const Json* value, TokenizerFile& out);

}  // namespace qmlp::text
