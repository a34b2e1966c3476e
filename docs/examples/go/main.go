// Creates a VM, watches it until it runs, talks to its serial console, and deletes it.
//
// protoc with protoc-gen-go and protoc-gen-go-grpc (Debian packages) makes the messages from the protocol
// files, here or from the package's /usr/share/vmmd/proto:
//
//	sh generate ../../../proto .
//	go mod tidy
//	go run . -socket /run/vmmd/vmmd.sock -kernel /boot/vmlinuz example
//
// Over TCP, with certificates as `vmmd init-certs` makes them:
//
//	go run . -address node-1:7443 -ca ca.crt -cert admin.crt -key admin.key …
package main

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	v1 "vmmd-example/vmmdv1"
)

// Time for a restart of the daemon.
const patience = 30 * time.Second

// Wait before the next try.
const pause = 200 * time.Millisecond

// The command line.
type options struct {
	socket, address, ca, cert, key string
	kernel, initrd, cmdline        string
	line, expected                 string
	name                           string
}

func parse() options {
	var o options
	flag.StringVar(&o.socket, "socket", "/run/vmmd/vmmd.sock", "the API's socket")
	flag.StringVar(&o.address, "address", "", "HOST:PORT of the API over TCP")
	flag.StringVar(&o.ca, "ca", "", "certificate of the CA")
	flag.StringVar(&o.cert, "cert", "", "this client's certificate")
	flag.StringVar(&o.key, "key", "", "its key")
	flag.StringVar(&o.kernel, "kernel", "", "path on the node")
	flag.StringVar(&o.initrd, "initrd", "", "path on the node")
	flag.StringVar(&o.cmdline, "cmdline", "console=ttyS0", "of the kernel")
	flag.StringVar(&o.line, "type", "", "a line for the console")
	flag.StringVar(&o.expected, "expect", "", "what the console prints then")
	flag.Parse()
	if flag.NArg() != 1 || o.kernel == "" {
		fmt.Fprintln(os.Stderr, "usage: vmmd-example -kernel PATH [flags] NAME")
		flag.PrintDefaults()
		os.Exit(2)
	}
	o.name = flag.Arg(0)
	return o
}

// connect makes a channel over the UNIX socket, or over TCP with mutual TLS.
func connect(o options) (*grpc.ClientConn, error) {
	if o.address == "" {
		return grpc.Dial("unix:"+o.socket, grpc.WithInsecure())
	}
	ca, err := os.ReadFile(o.ca)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return nil, fmt.Errorf("%s has no certificate", o.ca)
	}
	own, err := tls.LoadX509KeyPair(o.cert, o.key)
	if err != nil {
		return nil, err
	}
	config := &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{own}}
	return grpc.Dial(o.address, grpc.WithTransportCredentials(credentials.NewTLS(config)))
}

// reason returns the machine-readable reason of a failed call, such as "VM_NOT_FOUND", or an empty string.
func reason(err error) string {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			return info.Reason
		}
	}
	return ""
}

// requestID returns an id for one request: a random UUID.
func requestID() (string, error) {
	var b [16]byte
	if _, err := rand.Read(b[:]); err != nil {
		return "", err
	}
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:]), nil
}

// change repeats a mutating request until it is answered. The request has an id, so it is carried out once.
func change(call func() error) error {
	end := time.Now().Add(patience)
	for {
		err := call()
		if status.Code(err) != codes.Unavailable || time.Now().After(end) {
			return err
		}
		time.Sleep(pause)
	}
}

// A watch receives the events of one VM, over restarts of the daemon.
type watch struct {
	vms    v1.VmServiceClient
	name   string
	cursor string
}

// until waits for the first event for which wanted is true. After a lost connection it continues after the
// last cursor, so that each event comes once.
func (w *watch) until(ctx context.Context, wanted func(*v1.WatchVmsResponse) bool) error {
	var lost time.Time
	for {
		err := w.follow(ctx, func(event *v1.WatchVmsResponse) bool {
			// Each connection has at least one event, SYNCED.
			w.cursor, lost = event.Cursor, time.Time{}
			return wanted(event)
		})
		if err == nil {
			return nil
		}
		if lost.IsZero() {
			lost = time.Now()
		}
		if reason(err) == "CURSOR_EXPIRED" {
			// Events may have been missed: start again with the current state.
			w.cursor = ""
		} else if status.Code(err) != codes.Unavailable && err != io.EOF || time.Since(lost) > patience {
			return err
		}
		time.Sleep(pause)
	}
}

// follow is one connection of a watch, until wanted is true of an event.
func (w *watch) follow(ctx context.Context, wanted func(*v1.WatchVmsResponse) bool) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := w.vms.WatchVms(ctx, &v1.WatchVmsRequest{Name: w.name, Cursor: w.cursor})
	if err != nil {
		return err
	}
	for {
		event, err := stream.Recv()
		if err != nil {
			return err
		}
		if wanted(event) {
			return nil
		}
	}
}

// talk types a line on the console and prints the output until expected has been printed.
func talk(ctx context.Context, vms v1.VmServiceClient, o options) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := vms.Console(ctx)
	if err != nil {
		return err
	}
	open := &v1.ConsoleRequest{Message: &v1.ConsoleRequest_Open{Open: &v1.ConsoleOpen{Name: o.name}}}
	line := &v1.ConsoleRequest{Message: &v1.ConsoleRequest_Input{Input: []byte(o.line + "\n")}}
	for _, request := range []*v1.ConsoleRequest{open, line} {
		if err := stream.Send(request); err != nil {
			return err
		}
	}
	var seen strings.Builder
	for {
		response, err := stream.Recv()
		if err != nil {
			return err
		}
		if closed := response.GetClosed(); closed != nil {
			return errors.New("the console was closed: " + closed.Reason)
		}
		os.Stdout.Write(response.GetOutput())
		seen.Write(response.GetOutput())
		if strings.Contains(seen.String(), o.expected) {
			return nil
		}
	}
}

// manifest is a small VM that boots a kernel of the node.
func manifest(o options) *v1.Vm {
	return &v1.Vm{
		Metadata: &v1.ObjectMetadata{Name: o.name, Labels: map[string]string{"example": "go"}},
		Spec: &v1.VmSpec{
			Cpu:    &v1.CpuSpec{Cores: 1},
			Memory: &v1.MemorySpec{SizeBytes: 256 << 20},
			Boot: &v1.BootSpec{Source: &v1.BootSpec_Linux{
				Linux: &v1.LinuxBoot{Kernel: o.kernel, Initrd: o.initrd, Cmdline: o.cmdline},
			}},
			RunPolicy: v1.RunPolicy_RUN_POLICY_MANUAL,
		},
	}
}

func run(ctx context.Context, o options) error {
	channel, err := connect(o)
	if err != nil {
		return err
	}
	defer channel.Close()
	vms := v1.NewVmServiceClient(channel)

	id, err := requestID()
	if err != nil {
		return err
	}
	var created *v1.CreateVmResponse
	err = change(func() (err error) {
		created, err = vms.CreateVm(ctx, &v1.CreateVmRequest{Vm: manifest(o), Start: true, RequestId: id})
		return err
	})
	if err != nil {
		return err
	}
	uid := created.Vm.Metadata.Uid
	fmt.Printf("created %s, uid %s\n", o.name, uid)

	watch := &watch{vms: vms, name: o.name}
	err = watch.until(ctx, func(event *v1.WatchVmsResponse) bool {
		return event.GetVm().GetStatus().GetPhase() == v1.VmPhase_VM_PHASE_RUNNING
	})
	if err != nil {
		return err
	}
	fmt.Println("it runs")
	if err := talk(ctx, vms, o); err != nil {
		return err
	}

	if id, err = requestID(); err != nil {
		return err
	}
	err = change(func() error {
		_, err := vms.DeleteVm(ctx, &v1.DeleteVmRequest{
			Name:  o.name,
			Force: true,
			// Never a newer VM with the same name.
			Preconditions: &v1.Preconditions{Uid: uid},
			RequestId:     id,
		})
		return err
	})
	if err != nil {
		return err
	}
	// This continues after the last event of the first wait, as after a lost connection.
	err = watch.until(ctx, func(event *v1.WatchVmsResponse) bool {
		return event.Type == v1.WatchEventType_WATCH_EVENT_TYPE_DELETED
	})
	if err != nil {
		return err
	}
	fmt.Println("it is deleted")
	return nil
}

func main() {
	if err := run(context.Background(), parse()); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}
