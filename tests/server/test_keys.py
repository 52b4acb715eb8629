"""API keys: how they are written, and who is let in."""

from __future__ import annotations

import hmac

import pytest

from samkv_integrations.errors import InvalidOption
from samkv_integrations.server import tenancy as module
from samkv_integrations.server.tenancy import ApiKeys, Tenant

EVERYBODY = Tenant(namespace="ours", collections=("notes",))
TEXT = """
# of the red team
sk-of-the-red-team red   # trailing
sk-of-the-blue-team "blue team" notes letters
sk-of-nobody-else-1
sk-of-the-default-1 "" notes
"""


def test_lines_bind_keys_to_namespaces_and_collections() -> None:
    keys = ApiKeys(TEXT, EVERYBODY)
    assert keys.tenant_of("Bearer sk-of-the-red-team") == Tenant(namespace="red")
    assert keys.tenant_of("bearer  sk-of-the-blue-team") == Tenant(
        namespace="blue team", collections=("notes", "letters")
    )
    assert keys.tenant_of("Bearer sk-of-nobody-else-1") == EVERYBODY
    assert keys.tenant_of("Bearer sk-of-the-default-1") == Tenant(collections=("notes",))
    assert set(keys.tenants) == {
        Tenant(namespace="red"),
        Tenant(namespace="blue team", collections=("notes", "letters")),
        Tenant(collections=("notes",)),
        EVERYBODY,
    }


@pytest.mark.parametrize(
    "header",
    [
        None, "", "Bearer", "Bearer ", "Bearer sk-of-the-red-tea", "Bearer sk-of-the-red-team!",
        "Bearer SK-OF-THE-RED-TEAM", "Basic sk-of-the-red-team", "sk-of-the-red-team",
        "Bearer \N{SNOWMAN}", "Bearer sk-of-the-red-team red",
    ],
)  # fmt: skip
def test_everybody_else_stays_out(header: str | None) -> None:
    assert ApiKeys(TEXT, EVERYBODY).tenant_of(header) is None


def test_without_keys_everybody_is_let_in() -> None:
    keys = ApiKeys("# none yet\n", EVERYBODY)
    assert not keys
    assert keys.tenant_of(None) == EVERYBODY
    assert list(keys.tenants) == [EVERYBODY]


@pytest.mark.parametrize(
    "header", ["Bearer sk-of-the-red-team", "Bearer sk-of-the-default-1", None]
)
def test_every_key_is_compared_whichever_fits(
    header: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return real(left, right)

    keys, real = ApiKeys(TEXT, EVERYBODY), hmac.compare_digest
    monkeypatch.setattr(module.hmac, "compare_digest", compare)
    keys.tenant_of(header)
    assert len(compared) == 4
    assert {len(side) for pair in compared for side in pair} == {32}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sk-short red", "line 1: a key must have at least 16"),
        ("\nsk-with-a-\N{SNOWMAN}-in-it red", "line 2: a key must have at least 16"),
        ("sk-of-the-red-team red\nsk-of-the-red-team blue", "line 2: the key occurs twice"),
        ('sk-of-the-red-team "red', "line 1: No closing quotation"),
    ],
)
def test_a_wrong_line_is_named_and_no_key_is_told(text: str, message: str) -> None:
    with pytest.raises(InvalidOption, match=message) as caught:
        ApiKeys(text, EVERYBODY)
    assert "sk-" not in str(caught.value)


def test_no_key_is_kept_as_it_is() -> None:
    keys = ApiKeys(TEXT, EVERYBODY)
    assert "sk-of" not in repr(vars(keys))
