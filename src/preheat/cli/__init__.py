"""The command line: thin. Parses, calls what stands below, prints. Decisions do not belong here."""
