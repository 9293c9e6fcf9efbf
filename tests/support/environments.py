"""Virtual environments as users have them, made in a second and without a network."""

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]


def build_wheel(directory: Path, checkout: Path = ROOT) -> Path:
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(words, cwd=checkout, check=True, capture_output=True)
    (wheel,) = directory.glob("*.whl")
    return wheel


class Environment:
    """A virtual environment with the packages of this one but Muster."""

    def __init__(self, root: Path, python: str = sys.executable, *, packages: bool = True) -> None:
        """Without `packages` it has only the standard library."""
        self.bin = root / "bin"
        self.python = self.bin / "python"
        subprocess.run([python, "-m", "venv", "--without-pip", str(root)], check=True)
        self.site = Path(self.output("import sysconfig; print(sysconfig.get_path('purelib'))"))
        if packages:
            # Of that folder itself .pth files are not read, so the checkout is not on the path.
            (self.site / "packages.pth").write_text(sysconfig.get_path("purelib"))

    def pip(self, *words: str) -> str:
        """Run pip for this environment, and return what it prints."""
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), *words]
        return subprocess.run(pip, check=True, capture_output=True, text=True).stdout

    def install(self, wheel: Path) -> None:
        self.pip("install", "--quiet", "--no-deps", "--no-index", str(wheel))

    def output(self, code: str) -> str:
        """Return what this Python prints."""
        words = [str(self.python), "-c", code]
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
