"""What the passes did to a graph, for people: as tables in a terminal and as one page with drawings."""
