// Two loops of exact products, with the bits of the eager operations in products.py. Built by fused.py.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define VECTORS
#endif

namespace {

constexpr int32_t kLeast = 27 << 23;        // bits of 2**-100
constexpr int32_t kInfinity = 255 << 23;
constexpr float kMagic = 12582912.0F;       // 1.5 * 2**23: adding it rounds to an integer, ties to even

int32_t bits_of(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// The factor of a row whose greatest size has these bits, and its scale; 0 and NaN where it is not finite.
float factor_of(int32_t greatest, int64_t bits, double* scale) {
  if (greatest >= kInfinity) {
    *scale = std::nan("");
    return 0.0F;
  }
  const int exponent = (std::max(greatest, kLeast) >> 23) - 126;
  *scale = std::ldexp(1.0, exponent - static_cast<int>(bits));
  return std::ldexp(1.0F, static_cast<int>(bits) - exponent);
}

// Some numbers, as floats and as digits to the base 256; what is not finite has the factor 0 and becomes 0.
template <int kDigits, bool kByColumns>
inline __attribute__((always_inline)) void write_numbers(const float* __restrict x, const float* __restrict factors,
                                                         int64_t size, float* __restrict integers,
                                                         int8_t* __restrict low, int8_t* __restrict middle,
                                                         int8_t* __restrict high) {
  for (int64_t i = 0; i < size; ++i) {
    const float factor = factors[kByColumns ? i : 0];
    const float scaled = factor == 0.0F ? 0.0F : x[i] * factor;
    const int32_t whole = bits_of(scaled + kMagic) - bits_of(kMagic);
    integers[i] = static_cast<float>(whole);
    low[i] = static_cast<int8_t>(whole);
    const int32_t rest = (whole - low[i]) >> 8;
    middle[i] = static_cast<int8_t>(rest);
    if (kDigits == 3) high[i] = static_cast<int8_t>((rest - middle[i]) >> 8);
  }
}

}  // namespace

// Round a matrix [outer, inner] of unit inner stride; each outer row has a scale, or, by columns, each inner column.
// digits: three (or two) matrices of int8, of the same shape, one behind the other. sizes: int32 [inner], by columns.
extern "C" VECTORS void round_matrix(const float* x, int64_t outer, int64_t inner, int64_t stride, int64_t bits,
                                     int64_t num_digits, int64_t by_columns, float* integers, int8_t* digits,
                                     double* scale, int32_t* sizes, float* factors) {
  const int64_t count = outer * inner;
  if (by_columns != 0) {
    std::fill(sizes, sizes + inner, 0);
    for (int64_t row = 0; row < outer; ++row) {
      const float* source = x + row * stride;
      for (int64_t i = 0; i < inner; ++i) sizes[i] = std::max(sizes[i], bits_of(source[i]) & 0x7fffffff);
    }
    for (int64_t i = 0; i < inner; ++i) factors[i] = factor_of(sizes[i], bits, scale + i);
  }
  for (int64_t row = 0; row < outer; ++row) {
    const float* source = x + row * stride;
    float* whole = integers + row * inner;
    int8_t *low = digits + row * inner, *middle = low + count, *high = middle + count;
    if (by_columns == 0) {
      int32_t greatest = 0;
      for (int64_t i = 0; i < inner; ++i) greatest = std::max(greatest, bits_of(source[i]) & 0x7fffffff);
      factors[0] = factor_of(greatest, bits, scale + row);
    }
    if (num_digits == 3) {
      by_columns != 0 ? write_numbers<3, true>(source, factors, inner, whole, low, middle, high)
                      : write_numbers<3, false>(source, factors, inner, whole, low, middle, high);
    } else {
      by_columns != 0 ? write_numbers<2, true>(source, factors, inner, whole, low, middle, nullptr)
                      : write_numbers<2, false>(source, factors, inner, whole, low, middle, nullptr);
    }
  }
}

// Add the products of digits [rows, columns] of one run to `total`, or, after the last run, scale and round to float.
// parts: num_digits ** 2 matrices, that of the left digit i and the right one j at i * num_digits + j.
extern "C" VECTORS void add_digits(const int32_t* const* parts, int64_t num_digits, int64_t rows, int64_t columns,
                                   const double* left, const double* right, double* total, int64_t is_first,
                                   int64_t is_last, float* result) {
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t base = row * columns;
    double* sums = total + (is_first != 0 && is_last != 0 ? 0 : base);
    const double scale = left[row];
    if (num_digits == 3) {
      const int32_t *p0 = parts[0] + base, *p1 = parts[1] + base, *p2 = parts[2] + base, *p3 = parts[3] + base,
                    *p4 = parts[4] + base, *p5 = parts[5] + base, *p6 = parts[6] + base, *p7 = parts[7] + base,
                    *p8 = parts[8] + base;
      for (int64_t i = 0; i < columns; ++i) {
        double sum = static_cast<double>(p8[i]);
        sum = sum * 256.0 + static_cast<double>(p5[i] + p7[i]);
        sum = sum * 256.0 + static_cast<double>(p2[i] + p4[i] + p6[i]);
        sum = sum * 256.0 + static_cast<double>(p1[i] + p3[i]);
        sum = sum * 256.0 + static_cast<double>(p0[i]);
        sums[i] = is_first != 0 ? sum : sums[i] + sum;
      }
    } else {
      const int32_t *p0 = parts[0] + base, *p1 = parts[1] + base, *p2 = parts[2] + base, *p3 = parts[3] + base;
      for (int64_t i = 0; i < columns; ++i) {
        const double sum = (static_cast<double>(p3[i]) * 256.0 + static_cast<double>(p1[i] + p2[i])) * 256.0 +
                           static_cast<double>(p0[i]);
        sums[i] = is_first != 0 ? sum : sums[i] + sum;
      }
    }
    if (is_last != 0) {
      for (int64_t i = 0; i < columns; ++i) result[base + i] = static_cast<float>(sums[i] * scale * right[i]) + 0.0F;
    }
  }
}
