"""`penstock bench`: penstock beside its peers on this machine, in one table, one JSON file and one figure."""
