"""Scores of an answer, as LongBench computes them.

Source: LongBench/metrics.py of THUDM/LongBench at 2e00731 (MIT). Values are shares, 0 to 1.
"""

from __future__ import annotations

import logging
import string
from collections.abc import Sequence
from typing import Any, Literal

from samkv_integrations.errors import MissingExtra
from samkv_integrations.evaluation import measures

Language = Literal["en", "zh"]

_CHINESE_PUNCTUATION = "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."  # noqa: E501
"""Not whole in the source either: 《 and the middle dot stay."""

_NO_CHINESE_PUNCTUATION = str.maketrans("", "", string.punctuation + _CHINESE_PUNCTUATION)


def f1_words_zh(text: str) -> list[str]:
    """Words as ``qa_f1_zh_score`` compares them: jieba's, lower case, no punctuation."""
    words = (word.lower().translate(_NO_CHINESE_PUNCTUATION) for word in _segment(text))
    return [joined for word in words if (joined := "".join(word.split()))]


def qa_f1_zh_score(answer: str, expected: str) -> float:
    """F1 over Chinese words, their order ignored. Raises MissingExtra without jieba."""
    return measures.f1(f1_words_zh(answer), f1_words_zh(expected))


def rouge_zh_score(answer: str, expected: str) -> float:
    """ROUGE-L over Chinese words. Raises MissingExtra without jieba and rouge."""
    texts = [" ".join(_segment(text)) for text in (answer, expected)]
    measure = _rouge().Rouge()
    try:
        found = measure.get_scores([texts[0]], [texts[1]], avg=True)
    except Exception:  # an empty text, one that recurses too deep: whatever it is counts 0 there
        return 0.0
    return float(found["rouge-l"]["f"])


def exact_match(answer: str, expected: Sequence[str], language: Language = "en") -> float:
    """1 if the answer equals one of the expected ones but for what F1 ignores, else 0."""
    if language == "zh":
        return float(any("".join(f1_words_zh(answer)) == "".join(f1_words_zh(e)) for e in expected))
    return measures.exact_match(answer, expected)


def f1_score(answer: str, expected: Sequence[str], language: Language = "en") -> float:
    """The best F1 over the expected answers."""
    if language == "zh":
        return max(qa_f1_zh_score(answer, e) for e in expected)
    return measures.f1_score(answer, expected)


def scores(answer: str, expected: Sequence[str], language: Language) -> dict[str, float]:
    """Every score by its name; ``rouge_l``, LongBench's own for DuReader, for Chinese only."""
    found = {
        "exact_match": exact_match(answer, expected, language),
        "f1": f1_score(answer, expected, language),
    }
    if language == "zh":
        found["rouge_l"] = max(rouge_zh_score(answer, e) for e in expected)
    return found


def require_extras(language: Language) -> None:
    """Raise MissingExtra if a package that the scores of a language take is not installed."""
    if language == "zh":
        _jieba()
        _rouge()


def _segment(text: str) -> list[str]:
    words = _jieba()
    words.setLogLevel(logging.WARNING)  # else it reports that it reads its dictionary
    return list(words.cut(text, cut_all=False))


def _jieba() -> Any:  # noqa: ANN401
    try:
        import jieba
    except ImportError as error:
        raise MissingExtra.of("jieba", "bench") from error
    return jieba


def _rouge() -> Any:  # noqa: ANN401
    try:
        import rouge
    except ImportError as error:
        raise MissingExtra.of("rouge", "bench") from error
    return rouge
