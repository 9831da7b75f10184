#include "stop_filter.h"

#include <gtest/gtest.h>

#include <random>

namespace qmlp::cli {
namespace {

// What is shown of `text` when it comes in the given pieces.
std::string shown(const std::string& text, const std::vector<std::string>& stops,
                  const std::vector<std::size_t>& cuts, bool* stopped = nullptr) {
  StopFilter filter(stops);
  std::string out;
  std::size_t begin = 0;
  for (const std::size_t end : cuts) {
    out += filter.push(text.substr(begin, end - begin));
    begin = end;
  }
  out += filter.push(text.substr(begin));
  out += filter.finish();
  if (stopped != nullptr) *stopped = filter.stopped();
  return out;
}

// The text before the stop string that is complete first, by trying every end.
std::string expected(const std::string& text, const std::vector<std::string>& stops) {
  for (std::size_t end = 1; end <= text.size(); ++end) {
    std::size_t begin = end;
    for (const std::string& stop : stops) {
      const bool here = stop.size() <= end && text.substr(end - stop.size(), stop.size()) == stop;
      if (here) begin = std::min(begin, end - stop.size());
    }
    if (begin < end) return text.substr(0, begin);
  }
  return text;
}

TEST(StopFilter, AcrossPieces) {
  bool stopped = false;
  EXPECT_EQ(shown("hello END more", {"END"}, {6, 7, 8}, &stopped), "hello ");
  EXPECT_TRUE(stopped);
  EXPECT_EQ(shown("hello EN", {"END"}, {6, 7}, &stopped), "hello EN");
  EXPECT_FALSE(stopped);
}

TEST(StopFilter, OverlappingBeginnings) {
  EXPECT_EQ(shown("aaab", {"aab"}, {1, 2, 3}), "a");
  EXPECT_EQ(shown("abababc", {"ababc"}, {1, 2, 3, 4, 5, 6}), "ab");
}

TEST(StopFilter, FirstCompleteOfSeveral) {
  EXPECT_EQ(shown("one two three", {"three", "two"}, {}), "one ");
  EXPECT_EQ(shown("xabcd", {"bcd", "abc"}, {2, 3, 4}), "x");
  EXPECT_EQ(shown("abcde", {"abcde", "cd"}, {}), "ab");
  EXPECT_EQ(shown("abcd", {"cd", "bcd"}, {1, 2}), "a");
}

TEST(StopFilter, NothingIsHeldWithoutReason) {
  StopFilter filter({"\n\n"});
  EXPECT_EQ(filter.push("line"), "line");
  EXPECT_EQ(filter.push("\n"), "");
  EXPECT_EQ(filter.push("next"), "\nnext");
}

TEST(StopFilter, EveryCuttingShowsTheSame) {
  std::mt19937 random(7);
  for (int round = 0; round < 20000; ++round) {
    const auto word = [&](std::size_t most) {
      std::string text(1 + random() % most, 'a');
      for (char& c : text) c = static_cast<char>('a' + random() % 2);
      return text;
    };
    const std::string text = word(20);
    const std::vector<std::string> stops = {word(5), word(5)};
    std::vector<std::size_t> cuts;
    for (std::size_t i = 1; i < text.size(); ++i) {
      if (random() % 2 == 0) cuts.push_back(i);
    }
    const std::string want = expected(text, stops);
    const std::string got = shown(text, stops, cuts);
    ASSERT_EQ(got, want) << text << " | " << stops[0] << " " << stops[1];
  }
}

}  // namespace
}  // namespace qmlp::cli
