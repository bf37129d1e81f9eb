"""Python of a node does not do again what each task of Ansible begins with."""

import sys

sys.path.insert(0, "/usr/share/gpufarm-simulator")
import archives  # type: ignore[import-not-found]
import spare  # type: ignore[import-not-found]

del sys.path[0]
FOLDER = "/var/cache/gpufarm-simulator"
archives.keep(FOLDER)
spare.instead(FOLDER)
