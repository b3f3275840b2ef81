"""Training under the engine, on ranks that are let go of when these tests are done."""
