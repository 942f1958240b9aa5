"""What each library is asked, by the names of the rows in benchmarks/agreement/rows.py."""
