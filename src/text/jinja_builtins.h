#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "qmlp/status.h"
#include "text/jinja.h"

// What values do in a template: Python's and Jinja's rules for the kinds of values that chat
// templates use. `at` is the template's byte for messages.
namespace qmlp::text::jinja {

const Value* find(const Dict& dict, std::string_view name) noexcept;
void set(Dict& dict, std::string_view name, Value value);
bool is_true(const Value& value) noexcept;

// What {{ value }} prints.
Result<MarkedText> printed(const Value& value, std::size_t at);
Result<Value> attribute(const Value& object, std::string_view name, std::size_t at);
Result<Value> item(const Value& object, const Value& key, std::size_t at);
Result<Value> slice(const Value& object, std::optional<std::int64_t> begin,
                    std::optional<std::int64_t> end, std::int64_t step, std::size_t at);
Result<Value> apply_operator(std::string_view op, const Value& left, const Value& right,
                             std::size_t at);

// The first of `parts` is what the filter or test is applied to, the others are its arguments.
Result<Value> apply_filter(std::string_view name, const List& parts, const Dict& named,
                           std::size_t at);
Result<Value> apply_test(std::string_view name, const List& parts, std::size_t at);
Result<Value> call_method(const Value& object, std::string_view name, const List& arguments,
                          std::size_t at);

// Whether a value is this dictionary or has it within, so that putting it there would never be
// freed.
bool holds(const Value& value, const Dict& wanted);
Result<bool> equal(const Value& left, const Value& right, std::size_t at);

// White space and case of strings, as Python has them.
MarkedText strip(const MarkedText& text, bool left, bool right,
                 const std::optional<std::string>& of);
Result<MarkedText> change_case(const MarkedText& text, std::string_view name, std::size_t at);
bool python_space(char32_t c) noexcept;
// Values as text with a separator between them.
Result<Value> join(const List& values, const MarkedText& separator, std::size_t at);
// len(): characters of a string.
Result<std::int64_t> length(const Value& value, std::size_t at);

// The functions that Hugging Face gives to templates; those not understood fail when called.
bool is_function(std::string_view name) noexcept;
Value function(std::string_view name);
Result<Value> call_function(std::string_view name, const List& arguments, Dict named,
                            std::size_t at);

}  // namespace qmlp::text::jinja
