#pragma once

#include "qmlp/attention.h"   // IWYU pragma: export
#include "qmlp/checkpoint.h"  // IWYU pragma: export
#include "qmlp/cpu.h"         // IWYU pragma: export
#include "qmlp/model.h"       // IWYU pragma: export
#include "qmlp/ops.h"         // IWYU pragma: export
#include "qmlp/plan.h"        // IWYU pragma: export
#include "qmlp/quant.h"       // IWYU pragma: export
#include "qmlp/status.h"      // IWYU pragma: export
#include "qmlp/tensor.h"      // IWYU pragma: export
#include "qmlp/tokenizer.h"   // IWYU pragma: export
#include "qmlp/types.h"       // IWYU pragma: export
#include "qmlp/version.h"     // IWYU pragma: export
