"""GGUF files of small models, written with the `gguf` package as llama.cpp's converter writes them."""
import gguf
import numpy
from gguf import GGMLQuantizationType as Type
from tokenizers.pre_tokenizers import ByteLevel

VOCAB = 288  # a byte-level BPE of all bytes and some rows that no token uses

# The byte offsets of the f16 numbers in a block of each type.
HALVES = {
    Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q5_1: [0, 2], Type.Q8_0: [0],
    Type.Q2_K: [80, 82], Type.Q3_K: [108], Type.Q4_K: [0, 2], Type.Q5_K: [0, 2],
    Type.Q6_K: [208], Type.IQ4_NL: [0], Type.IQ4_XS: [0],
}
AFFINE = {Type.Q4_0: 4, Type.Q4_1: 4, Type.Q5_0: 5, Type.Q5_1: 5, Type.Q8_0: 8, Type.Q4_K: 4,
          Type.Q5_K: 5}
REQUANTIZED = {Type.Q2_K: 3, Type.Q3_K: 4, Type.Q6_K: 8, Type.IQ4_NL: 5, Type.IQ4_XS: 5}
EXACT_IN_F16 = {Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0}


def random_blocks(rng, qtype, rows, columns, scales):
    """Random bytes as a matrix of `qtype`, with each f16 number drawn from `scales`."""
    block, size = gguf.GGML_QUANT_SIZES[qtype]
    data = rng.integers(0, 256, (rows * columns // block, size), dtype=numpy.uint8)
    for offset in HALVES[qtype]:
        drawn = rng.choice(numpy.asarray(scales, numpy.float16), len(data))
        data[:, offset:offset + 2] = drawn.view(numpy.uint8).reshape(-1, 2)
    return data.reshape(rows, columns // block * size)


def interleave(tensor, heads):
    """The rows of q or k as llama.cpp stores them for most llama types: rotary pairs side by side."""
    return (tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
            .swapaxes(1, 2).reshape(tensor.shape))


def halves(tensor, heads):
    """The inverse: the two halves of each head apart."""
    return (tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
            .swapaxes(1, 2).reshape(tensor.shape))


NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
}


def gguf_name(name):
    stem, _, kind = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


INTERLEAVED = ("llama", "smollm3", "minicpm", "granite")


def stored_heads(arch, config, name):
    """The heads whose rows are interleaved in this tensor; 0 when they are not."""
    if arch not in INTERLEAVED:
        return 0
    if ".q_proj." in name:
        return config["num_attention_heads"]
    return config["num_key_value_heads"] if ".k_proj." in name else 0


def add_config(writer, arch, config):
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    if "head_dim" in config:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    rotary = int(config.get("partial_rotary_factor", 1.0) * head_dim)
    writer.add_rope_dimension_count(rotary)
    if arch == "phi3":
        writer.add_sliding_window(config.get("sliding_window", 0))
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    if arch == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if arch == "minicpm":
        writer.add_embedding_scale(config["scale_emb"])
        writer.add_residual_scale(config["scale_depth"] / config["num_hidden_layers"] ** 0.5)
        writer.add_logit_scale(config["hidden_size"] / config["dim_model_base"])
    add_rope(writer, config, rotary)


def add_rope(writer, config, rotary):
    scaling = config.get("rope_scaling")
    if not scaling:
        return
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        if "beta_fast" in scaling:
            writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])
    elif kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(scaling, config["rope_theta"], rotary))
    elif kind == "longrope":
        ratio = (config["max_position_embeddings"] /
                 scaling["original_max_position_embeddings"])
        factor = 1.0
        if ratio > 1:
            factor = numpy.sqrt(1 + numpy.log(ratio) /
                                numpy.log(scaling["original_max_position_embeddings"]))
        writer.add_rope_scaling_attn_factors(float(factor))
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight",
                              numpy.array(scaling[f"{name}_factor"], numpy.float32))
    else:
        raise ValueError(kind)


def llama3_factors(scaling, theta, rotary):
    """What the wave lengths of rope type llama3 are multiplied by, in f32 as the converter does."""
    one = numpy.float32(1)
    context = scaling["original_max_position_embeddings"]
    factors = []
    for exponent in numpy.arange(0, rotary, 2, dtype=numpy.float32) / numpy.float32(rotary):
        wavelength = numpy.float32(2 * numpy.pi) / (one / numpy.float32(theta) ** exponent)
        turns = numpy.float32(context) / wavelength
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        if turns > high:
            factors.append(1.0)
        elif turns < low:
            factors.append(scaling["factor"])
        else:
            smooth = (turns - numpy.float32(low)) / numpy.float32(high - low)
            factors.append(one / ((one - smooth) / numpy.float32(scaling["factor"]) + smooth))
    return numpy.array(factors, numpy.float32)


def add_byte_tokenizer(writer):
    tokens = sorted(ByteLevel.alphabet()) + ["<|endoftext|>", "th", "he"]
    known = len(tokens)
    tokens += [f"[PAD{i}]" for i in range(known, VOCAB)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens[:known]] +
                           [5] * (VOCAB - known))
    writer.add_token_merges(["t h", "h e"])
    writer.add_eos_token_id(256)


def write_model(path, arch, config, weights, types=None, tokenizer=add_byte_tokenizer, **options):
    """Writes `weights` (Hugging Face names to f32 arrays) as `arch`; config as config.json has it.

    `types` gives the type of a matrix by its Hugging Face name; one that is not an array's own
    becomes that array's blocks: (type, bytes).
    """
    writer = gguf.GGUFWriter(path, arch, **options)
    add_config(writer, arch, config)
    tokenizer(writer)
    for name, tensor in weights.items():
        heads = stored_heads(arch, config, name)
        stored = interleave(tensor, heads) if heads else tensor
        qtype, data = (types or {}).get(name, (None, None))
        if data is not None:  # blocks already in the order of the file
            writer.add_tensor(gguf_name(name), data, raw_dtype=qtype)
        elif qtype is not None:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(stored, qtype),
                              raw_dtype=qtype)
        else:
            writer.add_tensor(gguf_name(name), numpy.ascontiguousarray(stored))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
