"""The release that this is, also where nothing is installed and so nothing can be looked up."""

VERSION = "0.1.0"
