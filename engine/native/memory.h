// Memory that lives as long as the executor: an arena for weights, buffers for activations.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

#include <sys/mman.h>

namespace forebay {

inline size_t round_up(size_t n, size_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// One anonymous mapping: zero-filled, page-aligned, resident only where touched.
class Mapping {
 public:
  explicit Mapping(size_t bytes) : bytes_(round_up(bytes, kHugePage)) {
    void* at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<char*>(at);
#if defined(MADV_HUGEPAGE)
    // Streaming a model through 4 KiB pages costs a TLB miss every 64 lines. Advice only.
    madvise(data_, bytes_, MADV_HUGEPAGE);
#endif
  }
  Mapping(Mapping&& other) noexcept : data_(other.data_), bytes_(other.bytes_) {
    other.data_ = nullptr;
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (data_) munmap(data_, bytes_);
  }
  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20;
  char* data_;
  size_t bytes_;
};

// Zero-filled pieces, 64-byte aligned, freed together.
class Arena {
 public:
  char* take(size_t bytes) {
    bytes = round_up(bytes, 64);
    if (mappings_.empty() || used_ + bytes > mappings_.back().bytes()) {
      mappings_.emplace_back(bytes > kChunk ? bytes : kChunk);
      used_ = 0;
    }
    char* at = mappings_.back().data() + used_;
    used_ += bytes;
    return at;
  }

 private:
  static constexpr size_t kChunk = size_t{64} << 20;
  std::vector<Mapping> mappings_;
  size_t used_ = 0;
};

// Rows of activations. Row strides leave zeroed padding behind each row, which is read as part of
// vectors and tiles and never written, so it stays zero.
struct Rows {
  char* data = nullptr;
  size_t stride = 0;  // bytes

  template <class T>
  T* row(size_t index) const {
    return reinterpret_cast<T*>(data + index * stride);
  }
};

}  // namespace forebay
