"""How is what others wrote read, shown and let in? Files, names, connections and texts, within bounds."""
