# The test node. Included by the top-level Makefile.

NODE = target/debug/node

.PHONY: node-tool
node-tool:
	@tests/setup-host.sh
	@$(CARGO) build -q --locked -p vmmd-tests $(FEATURES) --bin node

.PHONY: node-build
node-build: node-tool ## Build the images of the node and of the guests, as far as they are not there yet
	$(NODE) build

.PHONY: node-up
node-up: node-tool ## Boot a test node with vmmd in it and keep it running
	$(NODE) up

.PHONY: node-sync
node-sync: node-tool ## Bring the newest package into the running node, or with FROM=target/debug its programs only
	$(NODE) sync $(if $(FROM),--from $(FROM))

.PHONY: node-ssh
node-ssh: node-tool ## Open a shell in the running node
	@$(NODE) ssh

.PHONY: node-status
node-status: node-tool ## Tell whether the node runs, and how to reach it
	@$(NODE) status

.PHONY: node-down
node-down: node-tool ## End the node
	$(NODE) down
