"""How does one machine become several nodes? Network namespaces with addresses, links and limits of their own."""
