"""What plugin authors and this project test with: workers that live through a session, and the conformance kit.

Nothing here is imported by a run.
"""

from __future__ import annotations
