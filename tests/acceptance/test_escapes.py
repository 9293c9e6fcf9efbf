"""A sample of every kind of attack in `stress/security/escapes.py`."""

from pathlib import Path

import pytest

from stress.security import escapes


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_no_field_of_a_job_leads_out_of_its_directories(tmp_path: Path) -> None:
    tried = escapes.attempt(tmp_path, every=30, seed=0)
    assert escapes.is_good(tried), "\n".join(escapes.report(tried))
