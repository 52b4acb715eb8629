"""Models with random weights whose chat templates take tools, and answers that are dictated."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest import mock

from pydantic import BaseModel, Field

from samkv_integrations.runtimes.base import Runtime
from samkv_integrations.runtimes.transformers.runtime import Model
from tests.support.llama_cpp import of_transformers
from tests.support.models import byte_tokenizer, hf_model, liking
from tests.support.tested_runtime import ON_LLAMA_CPP, model_class

_MESSAGES = (
    "{% for m in messages %}<|{{ 'user' if m['role'] == 'tool' else m['role'] }}|>"
    "{% if m['role'] == 'tool' %}RESULT OF {{ m['tool_call_id'] }}: {% endif %}{{ m['content'] }}"
    "{% for call in m.get('tool_calls', []) %}CALL{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_CALL = "{{ call['function']['name'] | tojson }}{{ call['function']['arguments'] | tojson }}"


def _template(told: str, call: str) -> str:
    """told: how calls are written, in a real template's words. call: one of an earlier turn."""
    tools = "{% for t in tools %}\n{{ t | tojson }}{% endfor %}"
    return (
        f"{{% if tools %}}<|system|>{told}{tools}<|end|>{{% endif %}}"
        f"{_MESSAGES.replace('CALL', call)}"
    )


TEMPLATES = {
    "hermes": _template(
        '<tool_call>{"name": <function-name>, "arguments": <args-json-object>}</tool_call>',
        f"<tool_call>{_CALL}</tool_call>",
    ),
    "llama3": _template(
        'Respond in the format {"name": function name, "parameters": dictionary of argument name '
        "and its value}.",
        _CALL,
    ),
    "mistral": _template("[AVAILABLE_TOOLS]", f"[TOOL_CALLS] [{_CALL}]"),
    "unknown": _template("<function=name>", ""),
}


@cache
def tool_model(form: str = "hermes", likes: tuple[str, ...] = ('"',)) -> Model:
    """A tiny model with random weights; form: one of `TEMPLATES`.

    likes: tokens that it draws more often; quotes, so that strings do not go on for hundreds of
        letters.
    """
    tokenizer = byte_tokenizer(bos=True)
    tokenizer.chat_template = TEMPLATES[form]
    hf = hf_model("llama", max_position_embeddings=8192)
    liked = tokenizer.convert_tokens_to_ids(list(likes))
    if ON_LLAMA_CPP:
        return of_transformers(liking(hf, liked), tokenizer, f"tiny-{form}")
    return Model(liking(hf, liked), tokenizer, f"tiny-{form}")


QUESTION = "Which river is Denbury on?"
RECORD = "[Denbury] Denbury is a town on the river Tume, an hour from Flevport."
CALL = '<tool_call>\n{"name": "find_record", "arguments": {"town": "Denbury"}}\n</tool_call>'


def find_record(town: str) -> str:
    """Finds the record of a town."""
    return RECORD if town == "Denbury" else "none"


class Town(BaseModel):
    """A town."""

    name: str = Field(max_length=8)


def dictated(*texts: str) -> Any:
    """Inside it, one answer after the other is one of ``texts``, whatever the weights say."""
    left: Iterator[str] = iter(texts)
    sampler = model_class().sampler

    def dictating(model: Runtime, *arguments: Any) -> Any:
        made: Any = sampler(model, *arguments)
        tokens = iter([*model.tokenize(next(left), special=True), *model.eos_ids])
        made.next_if_sure = lambda logits, tolerance: next(tokens)
        return made

    return mock.patch.object(model_class(), "sampler", dictating)
