#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "convert/converted.h"
#include "convert/gguf_model.h"
#include "convert/tiny_gguf.h"
#include "io/temp_folder.h"
#include "qmlp/checkpoint.h"

namespace qmlp {
namespace {

using test::expect_error;
using test::Ggml;
using test::GgufBuilder;
using test::TempFolder;
using test::TinyGguf;

void set_split(GgufBuilder& part, std::uint16_t number, std::uint16_t count, std::int32_t tensors) {
  part.set("split.no", 2, GgufBuilder::raw(number));
  part.set("split.count", 2, GgufBuilder::raw(count));
  part.set("split.tensors.count", 5, GgufBuilder::raw(tensors));
}

std::string part_name(int number, int count) {
  std::string text = "m-0000" + std::to_string(number) + "-of-0000" + std::to_string(count);
  return text + ".gguf";
}

// TinyGguf in three parts. The metadata is in the first; the second has an alignment of its own.
struct Parts {
  TinyGguf whole{Ggml::q4_1};
  std::vector<GgufBuilder> parts;

  Parts() {
    parts = {whole, GgufBuilder(), GgufBuilder()};
    parts[1].alignment = 128;
    parts[1].u32("general.alignment", 128);
    const auto total = static_cast<std::int32_t>(whole.tensors.size());
    parts[0].tensors.assign(whole.tensors.begin(), whole.tensors.begin() + 4);
    parts[1].tensors.assign(whole.tensors.begin() + 4, whole.tensors.begin() + 9);
    parts[2].tensors.assign(whole.tensors.begin() + 9, whole.tensors.end());
    for (std::uint16_t i = 0; i < 3; ++i) set_split(parts[i], i, 3, total);
  }
  void write(const TempFolder& folder) const {
    for (int i = 0; i < 3; ++i) {
      folder.write(part_name(i + 1, 3), parts[static_cast<std::size_t>(i)].build());
    }
  }
};

TEST(GgufSplit, AnyPartOpensTheWholeModel) {
  const Parts split;
  const TempFolder folder;
  split.write(folder);
  for (int number = 1; number <= 3; ++number) {
    const auto model = GgufModel::open(folder.file(part_name(number, 3)), number % 2 == 0);
    ASSERT_TRUE(model.has_value()) << model.error().message;
    EXPECT_EQ(model->num_parts(), 3u);
    EXPECT_EQ(model->path(), folder.file(part_name(1, 3)));
    EXPECT_EQ(*model->find("general.architecture")->text(), "llama");
    ASSERT_EQ(model->tensors().size(), split.whole.tensors.size());
    for (const GgufBuilder::Tensor& tensor : split.whole.tensors) {
      const GgufTensor* found = model->find_tensor(tensor.name);
      ASSERT_NE(found, nullptr) << tensor.name;
      const auto data = model->data(*found);
      ASSERT_EQ(data.size(), tensor.bytes.size());
      EXPECT_EQ(std::memcmp(data.data(), tensor.bytes.data(), data.size()), 0) << tensor.name;
    }
  }
}

TEST(GgufSplit, ConvertsLikeOneFile) {
  const Parts split;
  const TempFolder folder;
  split.write(folder);
  const std::string one = folder.write("one.gguf", split.whole.build());
  ASSERT_TRUE(convert(one, folder.file("one"), {}).has_value());
  const auto report = convert(folder.file(part_name(2, 3)), folder.file("parts"), {});
  ASSERT_TRUE(report.has_value()) << report.error().message;
  for (const char* name : {"model.safetensors", "config.json", "tokenizer.json"}) {
    EXPECT_EQ(test::read_file(folder.file(std::string("one/") + name)),
              test::read_file(folder.file(std::string("parts/") + name)));
  }
}

TEST(GgufSplit, OneOfOneIsAWholeFile) {
  TinyGguf gguf;
  set_split(gguf, 0, 1, static_cast<std::int32_t>(gguf.tensors.size()));
  const TempFolder folder;
  EXPECT_TRUE(GgufModel::open(folder.write(part_name(1, 1), gguf.build())).has_value());
  EXPECT_TRUE(GgufModel::open(folder.write("any.gguf", gguf.build())).has_value());
  set_split(gguf, 0, 1, 3);
  expect_error(GgufModel::open(folder.write("any.gguf", gguf.build())), Errc::corrupt_file,
               "split.tensors.count is 3", "hold 11 tensors");
}

TEST(GgufSplit, RefusesPartsThatDoNotBelongTogether) {
  const auto refused = [](auto change, auto... texts) {
    Parts split;
    const TempFolder folder;
    split.write(folder);
    change(split, folder);
    for (const int given : {1, 2}) {
      const auto model = GgufModel::open(folder.file(part_name(given, 3)));
      expect_error(model, Errc::corrupt_file, texts...);
    }
  };
  const auto rewrite = [](const Parts& split, const TempFolder& folder, int number) {
    folder.write(part_name(number, 3), split.parts[static_cast<std::size_t>(number - 1)].build());
  };
  refused([](Parts&, const TempFolder& f) { std::filesystem::remove(f.file(part_name(3, 3))); },
          "m-00003-of-00003.gguf: is missing", "3 parts");
  refused([](Parts& s, const TempFolder& f) { f.write(part_name(4, 3), s.parts[2].build()); },
          "m-00004-of-00003.gguf: there are only 3 parts");
  refused(
      [&](Parts& s, const TempFolder& f) {
        set_split(s.parts[2], 2, 4, 11);
        rewrite(s, f, 3);
      },
      "m-00003-of-00003.gguf", "split.count is 4", "needs 3");
  refused(
      [&](Parts& s, const TempFolder& f) {
        set_split(s.parts[2], 1, 3, 11);
        rewrite(s, f, 3);
      },
      "m-00003-of-00003.gguf", "split.no is 1", "needs 2");
  refused(
      [&](Parts& s, const TempFolder& f) {
        set_split(s.parts[2], 2, 3, 12);
        rewrite(s, f, 3);
      },
      "m-00003-of-00003.gguf", "split.tensors.count is 12", "needs 11");
  refused(
      [&](Parts& s, const TempFolder& f) {
        s.parts[2].unset("split.count");
        s.parts[2].unset("split.no");
        rewrite(s, f, 3);
      },
      "m-00003-of-00003.gguf", "split.count is 1", "needs 3");
  refused(
      [&](Parts& s, const TempFolder& f) {
        s.parts[2].tensors.pop_back();
        rewrite(s, f, 3);
      },
      "split.tensors.count is 11", "hold 10 tensors");
  refused(
      [&](Parts& s, const TempFolder& f) {
        s.parts[2].tensors.back() = s.whole.tensors.front();
        rewrite(s, f, 3);
      },
      "tensor 'token_embd.weight' is in", "too");
  refused(
      [](Parts& s, const TempFolder& f) {
        const std::string part = s.parts[2].build();
        f.write(part_name(3, 3), part.substr(0, part.size() - 40));
      },
      "m-00003-of-00003.gguf", "byte", "truncated");
  refused([](Parts&, const TempFolder& f) { f.write(part_name(3, 3), "<!DOCTYPE html><html>"); },
          "m-00003-of-00003.gguf", "not a GGUF file");
}

TEST(GgufSplit, RefusesNamesThatHideTheOthers) {
  const Parts split;
  const TempFolder folder;
  split.write(folder);
  const std::string second = split.parts[1].build();
  expect_error(GgufModel::open(folder.write("second.gguf", second)), Errc::corrupt_file,
               "second.gguf: is part 2 of 3", "-00002-of-00003.gguf");
  expect_error(GgufModel::open(folder.write(part_name(1, 3), second)), Errc::corrupt_file,
               "is part 2 of 3");
  expect_error(GgufModel::open(folder.write(part_name(2, 2), second)), Errc::corrupt_file,
               "is part 2 of 3");
  expect_error(GgufModel::open(folder.write(part_name(1, 2), TinyGguf().build())),
               Errc::corrupt_file, "is named as part 1 of 2", "split.count");
}

TEST(GgufSplit, RefusesBrokenSplitKeys) {
  const auto refused = [](auto change, auto... texts) {
    Parts split;
    change(split.parts[0]);
    const TempFolder folder;
    split.write(folder);
    expect_error(GgufModel::open(folder.file(part_name(1, 3))), Errc::corrupt_file, texts...);
  };
  refused([](GgufBuilder& g) { g.text("split.count", "3"); }, "split.count is not an integer");
  refused([](GgufBuilder& g) { g.u32("split.count", 1 << 30); }, "split.count is not an integer");
  refused([](GgufBuilder& g) { g.u32("split.no", 3); }, "split.no is 3", "split.count is 3");
  refused([](GgufBuilder& g) { g.unset("split.tensors.count"); }, "split.tensors.count is missing");
  refused([](GgufBuilder& g) { g.set("split.no", 5, GgufBuilder::raw(std::int32_t{-1})); },
          "split.no is not an integer");
}

}  // namespace
}  // namespace qmlp
