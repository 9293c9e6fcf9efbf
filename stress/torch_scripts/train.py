"""``python train.py NAME`` trains one of the scripts, and prints a digest of its weights."""

import sys

from stress.torch_scripts import impure, pure
from stress.torch_scripts.frame import scripts_of

if __name__ == "__main__":
    scripts = {it.__name__: it for it in (*scripts_of(pure), *scripts_of(impure))}
    scripts[sys.argv[1]]().train()
