"""A tiny float Llama checkpoint with a byte-level tokenizer, made with the standard library alone."""
import json
import os
import random
import struct

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 3, 2, 1, 32
VOCAB = 260
IM_START, IM_END = 256, 257
CHAT_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ 'no thoughts\n' }}{% endif %}{% endif %}")


def byte_alphabet():
    """The printable character that stands for each byte in byte-level BPE files."""
    own = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    table, extra = {}, 0
    for byte in range(256):
        if byte in own:
            table[byte] = chr(byte)
        else:
            table[byte] = chr(256 + extra)
            extra += 1
    return table


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, (shape, values) in tensors.items():
        blob = struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": shape,
                        "data_offsets": [len(data), len(data) + len(blob)]}
        data += blob
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path):
    """{name: (dtype, shape, bytes)}"""
    with open(path, "rb") as file:
        blob = file.read()
    size, = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8:8 + size])
    out = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            out[name] = entry["dtype"], entry["shape"], blob[8 + size + begin:8 + size + end]
    return out


def weights(seed):
    rng = random.Random(seed)

    def normal(*shape, spread):
        count = 1
        for side in shape:
            count *= side
        return list(shape), [rng.gauss(0.0, spread) for _ in range(count)]

    # Only printable ASCII has embeddings: the tied head then never prefers another token.
    shape, table = normal(VOCAB, HIDDEN, spread=1.0)
    for token in range(VOCAB):
        if not 32 <= token < 127:
            table[token * HIDDEN:(token + 1) * HIDDEN] = [0.0] * HIDDEN
    for token in (10, IM_START, IM_END):  # used by chat prompts, never preferred
        table[token * HIDDEN] = 1e-3
    tensors = {"model.embed_tokens.weight": (shape, table)}
    for layer in range(LAYERS):
        base = f"model.layers.{layer}."
        for name, rows, cols in (("self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
                                 ("self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
                                 ("self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
                                 ("self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
                                 ("mlp.gate_proj", INTERMEDIATE, HIDDEN),
                                 ("mlp.up_proj", INTERMEDIATE, HIDDEN),
                                 ("mlp.down_proj", HIDDEN, INTERMEDIATE)):
            tensors[base + name + ".weight"] = normal(rows, cols, spread=1.5 / cols ** 0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[base + name + ".weight"] = [HIDDEN], [1.0] * HIDDEN
    tensors["model.norm.weight"] = [HIDDEN], [1.0] * HIDDEN
    return tensors


def write_float_model(folder, seed=1):
    os.makedirs(folder)
    write_safetensors(os.path.join(folder, "model.safetensors"), weights(seed))

    def save(name, value):
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            json.dump(value, file)

    save("config.json", {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "vocab_size": VOCAB, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": True, "bos_token_id": IM_START,
        "eos_token_id": IM_END, "hidden_act": "silu", "torch_dtype": "float32"})
    save("generation_config.json", {"eos_token_id": [IM_END]})
    alphabet = byte_alphabet()
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
               "special": True}
    save("tokenizer.json", {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": IM_START, "content": "<|im_start|>", **special},
                         {"id": IM_END, "content": "<|im_end|>", **special}],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                          "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                    "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False,
                  "vocab": {**{alphabet[b]: b for b in range(256)}, "<|im_start|>": IM_START,
                            "<|im_end|>": IM_END},
                  "merges": []}})
    save("tokenizer_config.json", {
        "tokenizer_class": "GPT2Tokenizer", "add_bos_token": False, "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE})
