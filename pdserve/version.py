"""The one version of all parts."""

VERSION = "0.1.0"
