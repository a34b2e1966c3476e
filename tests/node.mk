# The test node. Included by the top-level Makefile.

NODE = target/debug/node

.PHONY: node-tool node-build node-up node-sync node-ssh node-status node-down

# The command line to the node, and what it needs on this machine.
node-tool:
	@tests/setup-host.sh
	@cargo build -q -p vmmd-tests --bin node

# Builds the images of the node and of the guests, as far as they are not there yet.
node-build: node-tool
	$(NODE) build

# Boots a node with vmmd in it and keeps it running.
node-up: node-tool
	$(NODE) up

# Brings newly built vmmd into the running node: its package, or with FROM=target/debug the programs only.
node-sync: node-tool
	$(NODE) sync $(if $(FROM),--from $(FROM))

node-ssh: node-tool
	@$(NODE) ssh

node-status: node-tool
	@$(NODE) status

node-down: node-tool
	$(NODE) down
