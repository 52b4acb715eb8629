"""Files of questions, and lines that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from samkv_integrations.errors import InvalidOption
from samkv_integrations.lab.evaluation import read_questions


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("[1]", "Input should be an object"),
        ("{}", "question: Field required"),
        ('{"question": 1}', "question: Input should be a valid string"),
        ('{"question": "Who?", "answers": "one"}', "answers: Input should be a valid array"),
        ('{"question": " "}', "question: String should match pattern"),
        ("{", "Invalid JSON"),
        ("[" * 100_000, "recursion limit"),
        (r'{"question": "Who \ud800?"}', "hex escape"),
    ],
)
def test_a_line_that_is_no_question(tmp_path: Path, line: str, why: str) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(f'{{"question": "Who?"}}\n{line}\n')
    with pytest.raises(InvalidOption, match=f"line 2: .*{why}") as caught:
        read_questions(file)
    assert "Error(" not in str(caught.value)


def test_a_file_that_a_windows_editor_wrote(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question": "Who?"}\n', encoding="utf-8-sig")
    assert [one.question for one in read_questions(file)] == ["Who?"]
