// Random programs of views and in-place writes: the device against the CPU.
#include "tessera/xla/device/device.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <random>

#include "tessera/base/env.h"

namespace tessera::xla {
namespace {

at::Device device() {
  static const auto made = make_device();
  return made;
}

/// The same tensors on both sides: two that own memory, and views of them, of which each may overlap others.
class Drawn {
 public:
  explicit Drawn(uint32_t seed) : random_(seed) {
    for (int i = 0; i < 2; i++) {
      const auto base = torch::arange(2 * 3 * 4 * 5, torch::kFloat).view({2, 3, 4, 5}) + 1000 * i + 1;
      add(base.clone(), base.to(device()));
    }
  }

  void step() {
    const auto& from = here_[below(here_.size())];
    const auto place = static_cast<size_t>(&from - here_.data());
    switch (below(8)) {
      case 0:
      case 1:
      case 2:
      case 3:
        look(place);
        break;
      case 4:
        write(place, [n = static_cast<double>(below(9)) - 4](const at::Tensor& t) { return t.mul_(n); });
        break;
      case 5:
        write(place, [n = static_cast<double>(below(9))](const at::Tensor& t) { return t.dim() ? t.add_(t.flip({0}), n) : t; });
        break;
      case 6:
        copy(place);
        break;
      case 7:
        write(place, [](const at::Tensor& t) { return t.masked_fill_(t > 60.5, 7); });
        break;
    }
  }

  ::testing::AssertionResult is_same() const {
    const auto all = [](const std::vector<at::Tensor>& tensors) {
      std::vector<at::Tensor> flat;
      for (const auto& tensor : tensors) flat.push_back(tensor.reshape({-1}));
      return torch::cat(flat);
    };
    // All are read at once: each read by itself would be a program.
    const auto expected = all(here_), actual = all(there_).cpu();
    if (at::allclose(actual, expected, 1e-4, 1e-4, true)) return ::testing::AssertionSuccess();
    int64_t begin = 0;
    for (size_t i = 0; i < here_.size(); i++) {
      const auto own = actual.narrow(0, begin, here_[i].numel()).view(here_[i].sizes());
      begin += here_[i].numel();
      if (at::allclose(own, here_[i], 1e-4, 1e-4, true)) continue;
      return ::testing::AssertionFailure() << "tensor " << i << " of" << program_ << "\n"
                                           << here_[i].sizes() << here_[i].strides() << "\n"
                                           << here_[i] << own;
    }
    return ::testing::AssertionFailure();
  }

 private:
  size_t below(size_t count) { return random_() % count; }
  int64_t number(int64_t count) { return static_cast<int64_t>(below(static_cast<size_t>(count))); }

  void add(const at::Tensor& here, const at::Tensor& there) {
    here_.push_back(here);
    there_.push_back(there);
  }

  template <class Change>
  void view(size_t place, const char* name, const Change& change) {
    const auto made = change(here_[place]);
    if (made.numel() == 0 || made.numel() > 400) return;
    program_ += fmt_line(name, place);
    add(made, change(there_[place]));
  }

  std::string fmt_line(const char* name, size_t place) const {
    return "\n  " + std::to_string(here_.size()) + " = " + name + " " + std::to_string(place);
  }

  void look(size_t place) {
    const auto t = here_[place];
    if (t.dim() == 0) return view(place, "unsqueeze", [](const at::Tensor& x) { return x.unsqueeze(0); });
    const auto d = number(t.dim()), other = number(t.dim()), size = t.size(d), at = number(size), step = 1 + number(3);
    switch (below(11)) {
      case 0:
        return view(place, "transpose", [=](const at::Tensor& x) { return x.transpose(d, other); });
      case 1:
        return view(place, "select", [=](const at::Tensor& x) { return x.select(d, at); });
      case 2:
        return view(place, "narrow", [=](const at::Tensor& x) { return x.narrow(d, at, size - at); });
      case 3:
        return view(place, "slice", [=](const at::Tensor& x) { return x.slice(d, at, size, step); });
      case 4:
        return view(place, "unsqueeze", [=](const at::Tensor& x) { return x.unsqueeze(d); });
      case 5:
        return view(place, "diagonal", [=](const at::Tensor& x) { return d == other ? x : x.diagonal(0, d, other); });
      case 6:
        return view(place, "reshape", [=](const at::Tensor& x) { return x.reshape({-1}); });
      case 7:
        return view(place, "unfold", [=](const at::Tensor& x) { return x.unfold(d, 1 + at / 2, step); });
      case 8:
        return view(place, "expand", [=](const at::Tensor& x) {
          auto sizes = x.unsqueeze(d).sizes().vec();
          sizes[static_cast<size_t>(d)] = 2;
          return x.unsqueeze(d).expand(sizes);
        });
      case 9:
        return t.storage_offset() + 2 * step + 2 >= static_cast<int64_t>(t.storage().nbytes() / 4)
                   ? void()
                   : view(place, "as_strided", [=](const at::Tensor& x) {
                       return x.as_strided({2, 2}, {step + 2, step}, x.storage_offset());
                     });
      case 10:
        return view(place, "split", [=](const at::Tensor& x) { return x.tensor_split(2, d)[0]; });
    }
  }

  /// Whether no two of the tensor's elements share memory: writes to other tensors are undefined.
  bool is_plain(const at::Tensor& t) const {
    std::vector<int64_t> sorted;
    for (int64_t i = 0; i < t.dim(); i++) {
      if (t.size(i) > 1) sorted.push_back(i);
    }
    std::ranges::sort(sorted, {}, [&](int64_t i) { return t.stride(i); });
    int64_t reach = 0;
    for (const auto i : sorted) {
      if (t.stride(i) <= reach) return false;
      reach += t.stride(i) * (t.size(i) - 1);
    }
    return true;
  }

  template <class Change>
  void write(size_t place, const Change& change) {
    if (!is_plain(here_[place])) return;
    program_ += "\n  write " + std::to_string(place);
    change(here_[place]);
    change(there_[place]);
  }

  /// Copies from another tensor that fits, if it shares no memory.
  void copy(size_t place) {
    for (size_t i = 0; i < here_.size(); i++) {
      const auto from = (place + i) % here_.size();
      if (!is_plain(here_[place]) || here_[from].sizes() != here_[place].sizes() || here_[from].is_alias_of(here_[place])) continue;
      program_ += "\n  copy " + std::to_string(from) + " to " + std::to_string(place);
      here_[place].copy_(here_[from]);
      there_[place].copy_(there_[from]);
      return;
    }
  }

  std::mt19937 random_;
  std::vector<at::Tensor> here_, there_;
  std::string program_;
};

::testing::AssertionResult is_as_on_cpu(uint32_t seed) {
  Drawn program(seed);
  for (int i = 0; i < 12; i++) program.step();
  return program.is_same();
}

TEST(Views, DrawnProgramsAreAsOnTheCpu) {
  const auto first = std::stoul(env("TESSERA_TEST_FIRST").value_or("0")), count = std::stoul(env("TESSERA_TEST_PROGRAMS").value_or("100"));
  for (auto seed = static_cast<uint32_t>(first); seed < first + count; seed++) ASSERT_TRUE(is_as_on_cpu(seed)) << "of seed " << seed;
}

/// Adds a part of an array to itself in another order: without a barrier, one plugin would read elements that it has already written.
TEST(Views, PartsAreReadBeforeTheyAreWritten) { EXPECT_TRUE(is_as_on_cpu(329)); }

}  // namespace
}  // namespace tessera::xla
