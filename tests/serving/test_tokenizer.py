import gzip
import json
import shutil
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from jaxlora.errors import CheckpointError
from serving.chat_template import ChatTemplateError
from serving.detokenizer import IncrementalDetokenizer
from serving.tokenizer import Tokenizer
from tests.serving.tiny_tokenizers import (
    TOKENIZERS,
    byte_fallback_backend,
    byte_level_backend,
    write_folder,
)


TEXTS = ["", "he", "a 12 é", "日本語 👩‍👩‍👧", "\t  def f(x):\n", "<s>he</s>", "\x00\x7f"]


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path, byte_level_backend())


def put(folder, name, value):
    text = value if isinstance(value, str) else json.dumps(value)
    (folder / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_text_survives_the_round_trip(kind, text):
    tokenizer = TOKENIZERS[kind]
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_special_tokens_are_found_in_text_and_left_out_of_it(folder):
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode("<s>he</s>")
    assert [tokenizer.token(i) for i in ids] == ["<s>", "he", "</s>"]
    assert tokenizer.decode(ids) == "he"


def test_text_with_a_lone_surrogate_is_a_value_error(folder):
    with pytest.raises(ValueError, match="lone surrogate"):
        Tokenizer.from_folder(folder).encode("a\ud800")


def test_ids_beyond_the_vocabulary_add_no_text(folder):
    tokenizer = Tokenizer.from_folder(folder)
    beyond = tokenizer.vocab_size
    assert tokenizer.decode([beyond, *tokenizer.encode("he"), beyond + 9]) == "he"
    assert tokenizer.token(beyond) == "" and tokenizer.token_bytes(beyond) == b""
    assert tokenizer.is_silent(beyond) and not tokenizer.is_silent(beyond - 1)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("text", TEXTS)
def test_token_bytes_joined_are_the_text(kind, text):
    tokenizer = TOKENIZERS[kind]
    joined = b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode(text))
    assert joined.decode() == text


def test_truncation_and_padding_left_from_training_are_off(tmp_path):
    backend = byte_level_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=16)
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend))
    assert len(tokenizer.encode("abcd")) == 4


# End-of-sequence ids


@pytest.mark.parametrize(
    ("generation", "model", "wanted"),
    [
        ({"eos_token_id": [2, 3, 2]}, {"eos_token_id": 1}, (2, 3)),
        ({"eos_token_id": 0}, {}, (0,)),
        ({}, {"eos_token_id": 1}, (1,)),
        ({"eos_token_id": None}, {"text_config": {"eos_token_id": [1, 3]}}, (1, 3)),
        ({}, {}, (2,)),
    ],
)
def test_end_ids_come_from_generation_config_then_config_then_tokenizer(
    folder, generation, model, wanted
):
    put(folder, "generation_config.json", generation)
    put(folder, "config.json", model)
    put(folder, "tokenizer_config.json", {"eos_token": "</s>"})
    assert Tokenizer.from_folder(folder).eos_token_ids == wanted


def test_a_folder_without_any_end_token_has_none(folder):
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.eos_token_ids, tokenizer.eos_token, tokenizer.bos_token_id) == (
        (),
        None,
        None,
    )


# Named and added tokens


def test_special_tokens_map_wins_over_an_old_config(folder):
    put(folder, "tokenizer_config.json", {"eos_token": "<s>", "bos_token": "<s>"})
    put(folder, "special_tokens_map.json", {"eos_token": {"content": "</s>"}})
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.bos_token_id) == ("</s>", "<s>", 1)


def test_a_config_that_lists_added_tokens_wins_over_special_tokens_map(folder):
    put(folder, "tokenizer_config.json", {"eos_token": "<s>", "added_tokens_decoder": {}})
    put(folder, "special_tokens_map.json", {"eos_token": "</s>"})
    assert Tokenizer.from_folder(folder).eos_token == "<s>"


def test_a_token_only_the_config_lists_is_added_at_its_id(folder):
    size = byte_level_backend().get_vocab_size()
    put(folder, "tokenizer_config.json", {"added_tokens_decoder": {size: {"content": "<new>"}}})
    assert Tokenizer.from_folder(folder).encode("<new>") == [size]
    put(folder, "tokenizer_config.json", {"added_tokens_decoder": {size + 5: {"content": "<new>"}}})
    with pytest.raises(CheckpointError, match="tokenizer_config.json: added token '<new>' has id"):
        Tokenizer.from_folder(folder)


def test_a_named_token_is_special_even_where_the_vocabulary_does_not_say_so(folder):
    put(folder, "tokenizer_config.json", {"eos_token": "he"})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(tokenizer.encode("ahe")) == "a"


@pytest.mark.parametrize("add_bos", [True, False])
def test_tokenizer_json_alone_says_what_is_added_around_a_text(tmp_path, add_bos):
    backend = byte_fallback_backend(strip=False)
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    config = {"bos_token": "<s>", "add_bos_token": add_bos, "add_eos_token": True}
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend, tokenizer_config=config))
    assert [tokenizer.token(i) for i in tokenizer.encode("a")] == ["<s>", "a"]
    assert [tokenizer.token(i) for i in tokenizer.encode("a", False)] == ["a"]


def with_added(special):
    """The byte-level tokenizer with one more token, "<x>", of the next id."""
    backend = byte_level_backend()
    backend.add_tokens([AddedToken("<x>", special=special, normalized=False)])
    return backend


# "<x>" with another file's word on it: is it left out of a text?
MARKED = {
    "named": ({"tokenizer_config": {"eos_token": "<x>"}}, True),
    "named by the model": ({"tokenizer_config": {"image_token": "<x>"}}, True),
    "named in an object": ({"tokenizer_config": {"extra_special_tokens": {"a": "<x>"}}}, True),
    "nameless": ({"tokenizer_config": {"additional_special_tokens": ["<x>"]}}, False),
    "listed as special": (
        {"tokenizer_config": {"added_tokens_decoder": {264: {"content": "<x>", "special": True}}}},
        True,
    ),
    "in the map": ({"special_tokens_map": {"pad_token": "<x>"}}, True),
    "in an old file": ({"added_tokens": {"<x>": 264}}, False),
}


@pytest.mark.parametrize("name", MARKED)
def test_an_added_token_is_special_where_another_file_says_so(tmp_path, name):
    files, special = MARKED[name]
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, with_added(False), **files))
    assert tokenizer.decode(tokenizer.encode("a<x>")) == ("a" if special else "a<x>")
    assert tokenizer.is_silent(264) == special


def test_flags_of_a_listed_token_win_over_tokenizer_json(tmp_path):
    listed = {264: {"content": "<x>", "special": True, "lstrip": True}}
    config = {"added_tokens_decoder": listed}
    folder = write_folder(tmp_path, with_added(True), tokenizer_config=config)
    tokenizer = Tokenizer.from_folder(folder)
    assert [tokenizer.token(i) for i in tokenizer.encode("a <x>")] == ["a", "<x>"]


def test_a_token_only_added_tokens_json_lists_is_added(folder):
    put(folder, "added_tokens.json", {"<new>": 264})
    put(folder, "tokenizer_config.json", {"additional_special_tokens": ["<new>"]})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("<new>") == [264] and tokenizer.is_silent(264)


def test_a_nameless_special_token_is_found_in_the_vocabulary(folder):
    put(folder, "tokenizer_config.json", {"additional_special_tokens": ["he", "<nowhere>"]})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(tokenizer.encode("ahe")) == "a"
    assert tokenizer.vocab_size == 264


def test_special_tokens_in_a_text_are_ordinary_text_where_the_config_splits_them(folder):
    put(folder, "tokenizer_config.json", {"split_special_tokens": True})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.decode(tokenizer.encode("<s>he</s>")) == "<s>he</s>"


# Refusals


WORDS = {"<unk>": 0, "a": 1}


@pytest.mark.parametrize(
    ("model", "decoder", "reason"),
    [
        (models.WordPiece(WORDS, unk_token="<unk>"), decoders.WordPiece(), "model type WordPiece"),
        (models.WordLevel(WORDS, unk_token="<unk>"), decoders.Fuse(), "model type WordLevel"),
        (models.BPE(WORDS, [], end_of_word_suffix="</w>"), decoders.Fuse(), "end_of_word_suffix"),
        (models.BPE(WORDS, [], continuing_subword_prefix="##"), decoders.Fuse(), "'##'"),
        (models.BPE(WORDS, [], dropout=0.1), decoders.Fuse(), "dropout 0.1"),
        (models.BPE(WORDS, []), decoders.BPEDecoder(), "decoder BPEDecoder"),
        (models.BPE(WORDS, []), decoders.CTC(), "decoder CTC"),
        (models.BPE(WORDS, []), None, "decoder null"),
        (models.BPE(WORDS, []), decoders.Replace("_", " "), "decoder Replace is only served for"),
        (models.BPE(WORDS, []), decoders.Metaspace("_"), "decoder Metaspace is only served for"),
        (
            models.BPE(WORDS, []),
            decoders.Sequence([decoders.Replace(Regex("."), " "), decoders.Fuse()]),
            "decoder Replace is only served for",
        ),
    ],
)
def test_a_kind_of_tokenizer_that_is_not_served_is_refused_by_name(
    tmp_path, model, decoder, reason
):
    backend = Backend(model)
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: ") as caught:
        Tokenizer.from_folder(write_folder(tmp_path, backend))
    assert reason in str(caught.value) and "served" in str(caught.value)


def test_a_unigram_tokenizer_is_served(tmp_path):
    scores = [("<unk>", 0.0), ("▁", -2.0), ("▁a", -1.0), ("b", -1.0), ("é", -3.0)]
    backend = Backend(models.Unigram(scores, unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer.from_folder(write_folder(tmp_path, backend))
    ids = tokenizer.encode("ab é")
    assert [tokenizer.token(i) for i in ids] == ["▁a", "b", "▁", "é"]
    assert tokenizer.decode(ids) == "ab é"
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == " ab é"


@pytest.mark.parametrize(
    ("strip", "wanted", "refused"),
    [(True, True, False), (True, False, True), (False, True, True), (False, None, False)],
)
def test_a_prefix_space_that_tokenizer_json_contradicts_is_refused(
    tmp_path, strip, wanted, refused
):
    config = {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": wanted}
    backend = byte_fallback_backend(strip=strip)
    folder = write_folder(tmp_path, backend, tokenizer_config=config)
    if refused:
        with pytest.raises(CheckpointError, match="tokenizer_config.json: add_prefix_space is"):
            Tokenizer.from_folder(folder)
    else:
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "not a tokenizer"),
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer_config.json", "{", "not a JSON file"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("tokenizer_config.json", '{"eos_token": 3}', "eos_token must be a string"),
        ("tokenizer_config.json", '{"eos_token": "\\ud800"}', "surrogates not allowed"),
        ("added_tokens.json", '{"<x>": 1.5}', "is malformed"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"a": 1}}', "is malformed"),
        ("tokenizer_config.json", '{"extra_special_tokens": 3}', "extra_special_tokens must be"),
        ("tokenizer_config.json", '{"extra_special_tokens": [3]}', "extra_special_tokens must be"),
        ("tokenizer_config.json", '{"split_special_tokens": 1}', "split_special_tokens must be"),
        ("added_tokens.json", '{"<x>": "a"}', "is malformed"),
        ("tokenizer_config.json", '{"added_tokens_decoder": []}', "is malformed"),
        ("special_tokens_map.json", '{"bos_token": {}}', "bos_token must be a string"),
        ("generation_config.json", "nope", "not a JSON file"),
        ("generation_config.json", '{"eos_token_id": "2"}', "eos_token_id must be a token id"),
        ("generation_config.json", '{"eos_token_id": [2, true]}', "eos_token_id must be"),
        ("config.json", '{"eos_token_id": -1}', "eos_token_id must be"),
    ],
)
def test_a_malformed_file_is_refused_by_name_in_one_line(folder, name, content, message):
    put(folder, name, content)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_folder(folder)
    assert str(caught.value).startswith(f"{folder / name}: ")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_tokenizer_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_folder(tmp_path)


def test_an_end_token_that_the_vocabulary_lacks_is_refused_by_name(folder):
    put(folder, "tokenizer_config.json", {"eos_token": "<gone>"})
    with pytest.raises(CheckpointError, match="'<gone>'"):
        Tokenizer.from_folder(folder)


# The rest


def test_the_chat_template_sees_the_named_tokens(folder):
    put(folder, "tokenizer_config.json", {"bos_token": "<s>"})
    put(folder, "chat_template.jinja", "{{ bos_token }}{{ messages[0].content }}{{ x }}")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.apply_chat_template([{"content": "hi"}], chat_template_kwargs={"x": 1}) == (
        "<s>hi1"
    )


def test_a_folder_without_a_template_refuses_chats(folder):
    with pytest.raises(ChatTemplateError, match="no default chat template"):
        Tokenizer.from_folder(folder).apply_chat_template([{"content": "hi"}])


def test_threads_may_share_a_tokenizer(folder):
    tokenizer = Tokenizer.from_folder(folder)
    texts = [f"he {i} é" * 20 for i in range(8)]
    results = {}

    def work(text):
        results[text] = [tokenizer.decode(tokenizer.encode(text)) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {text: [text] * 20 for text in texts}


# SmolLM2, against what transformers made of the same files

SMOLLM2 = Path(__file__).parents[1] / "data" / "smollm2"
CASES = json.loads((SMOLLM2 / "cases.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    for name in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        shutil.copyfile(SMOLLM2 / name, folder / name)
    packed = (SMOLLM2 / "tokenizer.json.gz").read_bytes()
    (folder / "tokenizer.json").write_bytes(gzip.decompress(packed))
    return Tokenizer.from_folder(folder)


@pytest.mark.parametrize("case", CASES["encode"], ids=lambda case: repr(case["text"][:12]))
def test_smollm2_texts_are_tokenized_as_transformers_does(smollm2, case):
    assert smollm2.encode(case["text"]) == case["ids"]
    assert smollm2.decode(case["ids"], skip_special_tokens=False) == case["decoded"]
    assert smollm2.decode(case["ids"]) == case["decoded_without_specials"]


@pytest.mark.parametrize("case", CASES["chat"], ids=lambda case: str(len(case["ids"])))
def test_smollm2_chats_are_rendered_as_transformers_does(smollm2, case):
    text = smollm2.apply_chat_template(case["messages"], case["add_generation_prompt"])
    assert text == case["text"]
    assert smollm2.encode(text, add_special_tokens=False) == case["ids"]


@pytest.mark.parametrize("case", CASES["encode"], ids=lambda case: repr(case["text"][:12]))
@pytest.mark.parametrize("prompt_length", [0, 1, 7])
def test_smollm2_texts_stream_to_what_they_decode_to(smollm2, case, prompt_length):
    prompt = smollm2.encode("The capital of France is")[:prompt_length]
    detokenizer = IncrementalDetokenizer(smollm2, prompt)
    pieces = [detokenizer.add([token]) for token in case["ids"]]
    assert "".join(pieces) + detokenizer.finish() == case["decoded_without_specials"]


def test_smollm2_has_its_special_tokens(smollm2):
    assert (smollm2.vocab_size, smollm2.bos_token_id, smollm2.eos_token_ids) == (49152, 1, (2,))
    assert (smollm2.bos_token, smollm2.eos_token) == ("<|im_start|>", "<|im_end|>")


# Live against transformers

FOLDERS = {
    "plain": (byte_level_backend(), {"eos_token": "</s>", "bos_token": "<s>"}),
    "no_bos": (byte_level_backend(), {"bos_token": "<s>", "add_bos_token": False}),
    "bos": (byte_level_backend(), {"bos_token": "<s>", "add_bos_token": True}),
    "bos_eos": (
        byte_fallback_backend(strip=False),
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True},
    ),
    "strip": (byte_fallback_backend(strip=True), {"bos_token": "<s>"}),
    "listed": (
        byte_level_backend(),
        {
            "pad_token": "<pad>",
            "added_tokens_decoder": {
                "264": {"content": "<pad>", "special": True},
                "265": {"content": "he he", "special": False},
            },
        },
    ),
    "named_special": (byte_level_backend(), {"eos_token": "he"}),
    "split_special": (byte_level_backend(), {"split_special_tokens": True}),
    **{
        f"marked {name}": (with_added(False), files.get("tokenizer_config", {}), files)
        for name, (files, _) in MARKED.items()
    },
}


@pytest.mark.oracle
@pytest.mark.parametrize("name", sorted(FOLDERS))
def test_equals_transformers_for_every_setting_of_a_folder(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    backend, config, *files = FOLDERS[name]
    others = {name: value for name, value in (files or [{}])[0].items() if value is not config}
    config = config | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{% endfor %}",
    }
    write_folder(tmp_path, backend, tokenizer_config=config, **others)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.from_folder(tmp_path)
    for text in [*TEXTS, "ahe he<pad>he", "a <x> he"]:
        for add in (False, True):
            ids = theirs.encode(text, add_special_tokens=add)
            assert ours.encode(text, add_special_tokens=add) == ids
        for skip in (False, True):
            wanted = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == wanted
    messages = [{"role": "user", "content": "<é> & 'x'", "name": None}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert ours.vocab_size == len(theirs)


def test_no_token_stands_for_more_characters_than_the_longest(smollm2):
    assert smollm2.longest_token == 81
    texts = ["=" * 900, " " * 900, "\n" * 900, "antidisestablishmentarianism " * 20, "日本語" * 50]
    for name in ("byte_level", "byte_fallback", "byte_fallback_strip"):
        tokenizer = TOKENIZERS[name]
        for text in texts:
            assert len(tokenizer.encode(text, False)) * tokenizer.longest_token >= len(text)
    for text in texts:
        assert len(smollm2.encode(text, False)) * 81 >= len(text)


@pytest.mark.parametrize("name", ["metaspace", "wordpiece"])
def test_an_unknown_word_of_any_length_is_one_token_so_there_is_no_longest(name):
    tokenizer = TOKENIZERS[name]
    assert len(tokenizer.encode("x" * 900, False)) == 1
    assert tokenizer.longest_token is None


# Any value in any place

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**70)
    | st.floats()
    | st.sampled_from(["<s>", "he", "", "<x>", "\ud800", "{{ messages }}", "{% if %}"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["content", "special", "a", "264", "name"]), inner)
    ),
    max_leaves=4,
)
KEYS = (
    *("bos_token", "eos_token", "image_token", "additional_special_tokens", "chat_template"),
    *("extra_special_tokens", "added_tokens_decoder", "split_special_tokens", "add_prefix_space"),
    *("tokenizer_class", "eos_token_id", "text_config", "<x>"),
)
NAMES = (
    *("tokenizer_config", "special_tokens_map", "added_tokens", "generation_config", "config"),
)


@settings(
    derandomize=True,
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    files=st.dictionaries(
        st.sampled_from(NAMES), st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3), max_size=3
    )
)
def test_any_value_is_read_or_refused_in_one_line(tmp_path, files):
    for name in NAMES:
        put(tmp_path, f"{name}.json", files.get(name, {}))
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    try:
        tokenizer = Tokenizer.from_folder(tmp_path)
    except CheckpointError as error:
        assert "\n" not in str(error) and str(tmp_path) in str(error)
    else:
        tokenizer.decode(tokenizer.encode("he <x>"))
