"""What a run is told about its speculation: counters, the report that they become, advice and plots."""
