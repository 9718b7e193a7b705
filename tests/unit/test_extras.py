"""What is said where an optional library cannot be imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from steadygrad.errors import ConfigError
from steadygrad.extras import import_extra


@pytest.mark.parametrize("broken", ["raise RuntimeError('operator vision::nms does not exist')", "import no_such_part"])
def test_a_library_that_is_broken_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    (tmp_path / "broken_vision.py").write_text(broken)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"--network needs broken_vision, which cannot be imported \(.*(nms|no_such)"):
        import_extra("vision", "broken_vision", what="--network", error=ConfigError)
