"""The version, as the package and each emitted text name it."""

VERSION = "0.1.0"
