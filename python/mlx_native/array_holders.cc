#include "array_holders.h"

namespace qmlp_mlx {
namespace {

// MLX keeps the descriptor to itself: a template's explicit instantiation may name private members.
long count_of(const mlx::core::array& a);
template <auto kDescriptor>
struct Opened {
  friend long count_of(const mlx::core::array& a) { return (a.*kDescriptor).use_count(); }
};
template struct Opened<&mlx::core::array::array_desc_>;

}  // namespace

long holders_of(const mlx::core::array& a) { return count_of(a); }

}  // namespace qmlp_mlx
