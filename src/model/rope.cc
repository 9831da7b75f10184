#include "model/rope.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "model/pinned_math.h"

namespace qmlp {
namespace {

constexpr double kTwoPi = 0x1.921fb54442d18p+2;

// Long waves are stretched by the factor, short ones kept, and those between blended.
void stretch_llama3(const ModelConfig& config, std::vector<double>& frequencies) {
  const RopeScaling& rope = config.rope;
  const auto original = static_cast<double>(rope.original_context);
  const double longest = original / rope.low_freq_factor;
  const double shortest = original / rope.high_freq_factor;
  for (double& frequency : frequencies) {
    const double wave = kTwoPi / frequency;
    if (wave > longest) {
      frequency = frequency / config.rope_factor;
    } else if (wave > shortest && wave < longest) {
      const double smooth =
          (original / wave - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
      frequency = frequency * ((1.0 - smooth) / config.rope_factor + smooth);
    }
  }
}

// The pair, as a real number, that turns `rotations` times over the original context.
double yarn_pair(const ModelConfig& config, double rotations) {
  const auto original = static_cast<double>(config.rope.original_context);
  return static_cast<double>(config.rotary_dim) * pinned_log(original / (rotations * kTwoPi)) /
         (2.0 * pinned_log(config.rope_theta));
}

double yarn_scale(double factor, double mscale) {
  return factor <= 1.0 ? 1.0 : 0.1 * mscale * pinned_log(factor) + 1.0;
}

// A ramp over the pairs from the original frequencies to those of stretched positions.
void stretch_yarn(const ModelConfig& config, RotaryFrequencies& out) {
  const RopeScaling& rope = config.rope;
  const double low = std::max(std::floor(yarn_pair(config, rope.beta_fast)), 0.0);
  double high = std::min(std::ceil(yarn_pair(config, rope.beta_slow)),
                         static_cast<double>(config.rotary_dim - 1));
  if (low == high) high += 0.001;
  for (std::size_t i = 0; i < out.frequencies.size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    const double kept = 1.0 - ramp;
    const double frequency = out.frequencies[i];
    out.frequencies[i] = frequency * kept + frequency / config.rope_factor * ramp;
  }
  out.scale = yarn_scale(config.rope_factor, rope.mscale) /
              yarn_scale(config.rope_factor, rope.mscale_all_dim);
}

void stretch_longrope(const ModelConfig& config, RotaryFrequencies& out) {
  for (std::size_t i = 0; i < out.frequencies.size(); ++i) {
    out.frequencies[i] = out.frequencies[i] / config.rope.long_factors[i];
  }
  if (config.rope_factor <= 1.0) return;
  const double original = pinned_log(static_cast<double>(config.rope.original_context));
  out.scale = std::sqrt(1.0 + pinned_log(config.rope_factor) / original);
}

}  // namespace

RotaryFrequencies rotary_frequencies(const ModelConfig& config) {
  RotaryFrequencies out;
  out.frequencies.resize(static_cast<std::size_t>(config.rotary_dim / 2));
  const double log_theta = pinned_log(config.rope_theta);
  for (std::size_t i = 0; i < out.frequencies.size(); ++i) {
    const double exponent = static_cast<double>(2 * i) / static_cast<double>(config.rotary_dim);
    out.frequencies[i] = pinned_exp(-exponent * log_theta);
  }
  switch (config.rope_kind) {
    case RopeKind::standard:
    case RopeKind::dynamic:  // equal to the default up to context_length, where a session ends
      break;
    case RopeKind::linear:
      out.divisor = config.rope_factor;
      break;
    case RopeKind::llama3:
      stretch_llama3(config, out.frequencies);
      break;
    case RopeKind::yarn:
      stretch_yarn(config, out);
      break;
    case RopeKind::longrope:
      stretch_longrope(config, out);
      break;
  }
  return out;
}

void rotary_row(const RotaryFrequencies& rotary, std::int64_t position, float* cosines,
                float* sines) {
  for (std::size_t i = 0; i < rotary.frequencies.size(); ++i) {
    const double angle = static_cast<double>(position) / rotary.divisor * rotary.frequencies[i];
    const SinCos value = pinned_sin_cos(angle);
    cosines[i] = static_cast<float>(value.cosine * rotary.scale);
    sines[i] = static_cast<float>(value.sine * rotary.scale);
  }
}

}  // namespace qmlp
