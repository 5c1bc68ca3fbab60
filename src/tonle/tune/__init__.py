"""Search for the settings of a server that hold an SLO: simulated first, then measured (`tonle tune`)."""
