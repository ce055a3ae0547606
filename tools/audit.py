"""Runs pip-audit, and reports for how many packages the advisory database gave an answer.

    python tools/audit.py PIP_AUDIT SITE_PACKAGES

pip-audit skips packages that the database does not know. If the database cannot be reached,
pip-audit skips all packages, and an empty list of vulnerabilities means nothing.
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
        last = done.stderr.strip().splitlines()[-1:] or ["pip-audit gave no reason"]
        print(f"NOT AUDITED: the advisory database cannot be reached ({last[0]}).")
        return 2
    passed = [it["name"] for it in packages if "skip_reason" in it and it["name"] != OWN]
    asked = len(packages) - len(passed)
    flaws = [(it, flaw) for it in packages for flaw in it.get("vulns", ())]
    for package, flaw in flaws:
        fixed = ", ".join(flaw["fix_versions"]) or "no version yet"
        print(f"{package['name']} {package['version']}: {flaw['id']}, fixed in {fixed}")
    print(f"{asked} of {len(packages)} packages were checked; {len(flaws)} vulnerabilities found.")
    if passed:
        print(f"NOT AUDITED, because the database gave no answer: {', '.join(passed)}.")
    return 1 if flaws else 2 if passed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
