"""What LlamaIndex packs for a window is computed, however its templates write it."""

from __future__ import annotations

import random

import pytest
from llama_index.core import PromptTemplate, Settings
from llama_index.core.response_synthesizers import get_response_synthesizer

from llama_index.llms.samkv import SamKVLLM
from samkv_integrations import Engine
from samkv_integrations.errors import PromptTooLong
from samkv_integrations.runtimes.transformers.runtime import Model
from tests.support.models import byte_tokenizer, hf_model

pytest_plugins = ("tests.support.llama_index_fixtures",)
pytestmark = pytest.mark.usefixtures("tokenizer_restored")

WINDOW = 384
N_QUERIES = 24
TEMPLATE = PromptTemplate("{context_str}\n{query_str}")
PIECES = ["\n", "\n\n", '"', "'", "\t", "\\", " It's ", 'said "no"', "caf\u00e9 ", "\n- ", "word "]


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Of a model whose tokens are bytes: every escape is one more."""
    model = hf_model("llama", max_position_embeddings=WINDOW, num_hidden_layers=1)
    return Engine(Model(model, byte_tokenizer(bos=True), "small"), method="recompute")


def documents(rng: random.Random, n_pieces: int) -> list[str]:
    return ["".join(rng.choices(PIECES, k=rng.randint(5, n_pieces))) for _ in range(3)]


def n_refused(llm: SamKVLLM, *, n_pieces: int = 120) -> int:
    """Of N_QUERIES whose documents are full of what `repr` escapes."""
    Settings.tokenizer = llm.tokenizer_fn
    rng, refused = random.Random(0), 0
    for _ in range(N_QUERIES):
        synthesizer = get_response_synthesizer(
            llm=llm, response_mode="simple_summarize", text_qa_template=TEMPLATE
        )
        try:
            synthesizer.get_response('Who\'s "that"?', documents(rng, n_pieces))
        except PromptTooLong:
            refused += 1
    return refused


@pytest.mark.parametrize("is_chat_model", [True, False])
def test_simple_summarize_fits_the_models_window(engine: Engine, is_chat_model: bool) -> None:
    """It cuts texts to the window, and writes a list of them: with escapes they were too long."""
    llm = SamKVLLM(engine=engine, max_new_tokens=1, is_chat_model=is_chat_model)
    assert llm.context_window == WINDOW
    assert n_refused(llm) == 0
    assert llm.last_report.prompt_tokens > 0.8 * WINDOW  # packed, not left empty


def test_what_was_packed_badly_is_computed_while_the_model_has_room(engine: Engine) -> None:
    """LlamaIndex's own tokenizer counts other tokens."""
    llm = SamKVLLM(engine=engine, max_new_tokens=1, context_window=WINDOW - 200)
    report = llm.complete("x" * (WINDOW - 50), formatted=True).raw["samkv"]
    assert report["prompt_tokens"] + 1 > llm.context_window
    with pytest.raises(PromptTooLong, match=f"context window of {WINDOW} "):
        llm.complete("x" * WINDOW, formatted=True)
