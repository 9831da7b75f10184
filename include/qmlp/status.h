#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>

namespace qmlp {

enum class Errc : std::uint8_t {
  invalid_argument,  // the caller broke a documented requirement
  unsupported,       // well formed, but nothing here takes it
  corrupt_file,      // the bytes contradict the format
  io,                // the operating system refused a file operation
  out_of_memory,
  device,       // the driver or runtime reported a failure
  interrupted,  // a caller's stop request was honoured
  internal,     // a bug in this library
};

// The code's name as messages and JSON print it, such as "corrupt_file".
const char* to_string(Errc code) noexcept;

struct Error {
  Errc code = Errc::internal;
  std::string message;  // one line: what, found, required
};

// The C++23 std::expected interface on C++20. Holds a T or an Error.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : state_(std::move(value)) {}      // NOLINT: implicit by design
  Result(Error error) : state_(std::move(error)) {}  // NOLINT: implicit by design
  bool has_value() const noexcept { return state_.index() == 0; }
  explicit operator bool() const noexcept { return has_value(); }
  T& operator*() & noexcept { return *std::get_if<0>(&state_); }
  const T& operator*() const& noexcept { return *std::get_if<0>(&state_); }
  T&& operator*() && noexcept { return std::move(*std::get_if<0>(&state_)); }
  T* operator->() noexcept { return std::get_if<0>(&state_); }
  const T* operator->() const noexcept { return std::get_if<0>(&state_); }
  const Error& error() const noexcept { return *std::get_if<1>(&state_); }

 private:
  std::variant<T, Error> state_;
};

template <>
class [[nodiscard]] Result<void> {
 public:
  Result() = default;
  Result(Error error) : error_(std::move(error)) {}  // NOLINT: implicit by design
  bool has_value() const noexcept { return !error_.has_value(); }
  explicit operator bool() const noexcept { return has_value(); }
  const Error& error() const noexcept { return *error_; }

 private:
  std::optional<Error> error_;
};

using Status = Result<void>;

}  // namespace qmlp
