"""What every suite shares: problems, cases, implementations, lanes, judging, the registry, the ledger, the report."""
