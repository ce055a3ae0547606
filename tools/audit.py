"""Asks whether flaws of installed packages are known, and says for how many there was an answer.

    python tools/audit.py PIP_AUDIT SITE_PACKAGES

pip-audit passes over packages of which the advisory database says nothing. Where it cannot be
reached that is all of them, and the list of flaws is empty for no good reason.
"""

import json
import subprocess
import sys
from typing import Any

OWN = "headrace"


def main(program: str, site: str) -> int:
    command = [program, "--path", site, "--format", "json", "--progress-spinner", "off"]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        packages: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or ["no reason was told"]
        print(f"NOT AUDITED: the advisory database cannot be reached ({last[0]}).")
        return 2
    passed = [it["name"] for it in packages if "skip_reason" in it and it["name"] != OWN]
    asked = len(packages) - len(passed)
    flaws = [(it, flaw) for it in packages for flaw in it.get("vulns", ())]
    for package, flaw in flaws:
        fixed = ", ".join(flaw["fix_versions"]) or "no version yet"
        print(f"{package['name']} {package['version']}: {flaw['id']}, mended in {fixed}")
    print(f"{asked} of {len(packages)} packages were looked up, {len(flaws)} flaws are known.")
    if passed:
        print(f"NOT AUDITED, since the database did not answer for them: {', '.join(passed)}.")
    return 1 if flaws else 2 if passed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
