"""What sqla_jobs decides: pure code, no SQL, clock, chance, I/O or threads (kept by import-linter)."""
