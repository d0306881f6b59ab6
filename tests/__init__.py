"""The test suite; a package, so that ranks import a test by the name pytest imported it by."""
