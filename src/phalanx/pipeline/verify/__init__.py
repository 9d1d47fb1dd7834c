"""Which party is right: claims, audits, states and links, the referee between two stories."""
