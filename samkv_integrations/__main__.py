"""``python -m samkv_integrations``: the command line, where its script is not on the path."""

from __future__ import annotations

from samkv_integrations.cli.app import main

if __name__ == "__main__":
    main()
