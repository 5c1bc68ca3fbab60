"""What each path of a pool makes of a request: wire types into jobs, results into replies. No model runs here."""
