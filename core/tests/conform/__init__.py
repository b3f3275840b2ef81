"""The conformance kit: made-up plugins, and processes that know them for as long as these tests run."""
