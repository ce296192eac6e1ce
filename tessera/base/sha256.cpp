#include "tessera/base/sha256.h"

#include <array>
#include <bit>
#include <cstdint>

namespace tessera {
namespace {

using Words8 = std::array<uint32_t, 8>;
constexpr size_t kHashBlock = 64;

uint32_t big_endian_at(std::string_view bytes, size_t place) {
  uint32_t word = 0;
  for (size_t i = 0; i < 4; i++) word = word << 8 | static_cast<unsigned char>(bytes[place + i]);
  return word;
}

void mix(Words8& state, std::string_view block) {
  static constexpr std::array<uint32_t, 64> kRounds = {
      0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
      0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
      0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
      0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
      0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
      0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
  std::array<uint32_t, 64> words{};
  for (size_t i = 0; i < 16; i++) words[i] = big_endian_at(block, 4 * i);
  for (size_t i = 16; i < 64; i++) {
    const uint32_t a = words[i - 15], b = words[i - 2];
    const uint32_t low = std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3, high = std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10;
    words[i] = words[i - 16] + low + words[i - 7] + high;
  }
  auto [a, b, c, d, e, f, g, h] = state;
  for (size_t i = 0; i < 64; i++) {
    const uint32_t one = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & f) ^ (~e & g)) + kRounds[i] + words[i];
    const uint32_t two = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + one, d = c, c = b, b = a, a = one + two;
  }
  const Words8 mixed = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < state.size(); i++) state[i] += mixed[i];
}

}  // namespace

std::string sha256(std::string_view bytes) {
  std::string padded(bytes);
  padded += '\x80';
  while (padded.size() % kHashBlock != kHashBlock - 8) padded += '\0';
  for (int shift = 56; shift >= 0; shift -= 8) padded += static_cast<char>(uint64_t{bytes.size()} * 8 >> shift);
  Words8 state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  for (size_t place = 0; place < padded.size(); place += kHashBlock) mix(state, std::string_view(padded).substr(place, kHashBlock));
  std::string digest;
  for (const uint32_t word : state) {
    for (int shift = 24; shift >= 0; shift -= 8) digest += static_cast<char>(word >> shift);
  }
  return digest;
}

std::string hmac_sha256(std::string_view key, std::string_view message) {
  std::string inner = key.size() > kHashBlock ? sha256(key) : std::string(key);
  inner.resize(kHashBlock);
  auto outer = inner;
  for (auto& byte : inner) byte ^= 0x36;
  for (auto& byte : outer) byte ^= 0x5c;
  return sha256(outer + sha256(inner.append(message)));
}

}  // namespace tessera
