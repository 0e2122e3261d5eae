//! Servers that say from which address they are called, and their clients.

use std::fs;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use crate::clock::wait_until;
use crate::hosts::{Host, Hosts};
use crate::process::{Process, run};

const LIMIT: Duration = Duration::from_secs(60);
const NGINX: u16 = 7010;
const REDIS: u16 = 8001;
const IPERF: u16 = 8002;
const POSTGRES: u16 = 8003;
const SSH: u16 = 8004;
const ASYNCIO: u16 = 8005;
/// Nobody intercepts connections to this port.
const ASIDE: u16 = 7011;

/// The servers, on host b, at one address.
pub(super) struct Servers {
    at: IpAddr,
    folder: PathBuf,
    _processes: Vec<Process>,
}

impl Servers {
    pub(super) fn start(hosts: &Hosts, at: IpAddr) -> Self {
        let family = if at.is_ipv6() { "6" } else { "4" };
        let folder = hosts.logs.join(format!("servers-{family}"));
        fs::create_dir_all(&folder).expect("the directory is ours");
        // The database runs as another user.
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).expect("it is ours");
        let place = if at.is_ipv6() { format!("[{at}]") } else { at.to_string() };
        let nginx = format!(
            "daemon off; user root; pid nginx.pid; error_log error.log;\n\
             events {{ }}\n\
             http {{ access_log off;\n\
               client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi;\n\
               uwsgi_temp_path uwsgi; scgi_temp_path scgi;\n\
               server {{ listen {place}:{NGINX}; listen {place}:{ASIDE};\n\
                 location / {{ return 200 \"$remote_addr\\n\"; }} }} }}\n"
        );
        fs::write(folder.join("nginx.conf"), nginx).expect("the directory is ours");
        fs::write(folder.join("server.py"), SERVER).expect("the directory is ours");
        fs::write(folder.join("client.py"), CLIENT).expect("the directory is ours");
        let shown = folder.display();
        let commands = [
            (NGINX, format!("exec nginx -p {shown} -c nginx.conf")),
            (
                REDIS,
                format!(
                    "exec redis-server --bind {at} --port {REDIS} --protected-mode no --save '' \
                     --dir {shown}"
                ),
            ),
            (IPERF, format!("exec iperf3 -s -B {at} -p {IPERF} --forceflush --logfile iperf3.log")),
            (POSTGRES, POSTGRES_SCRIPT.replace("$at", &at.to_string())),
            (SSH, SSH_SCRIPT.replace("$at", &at.to_string())),
            (ASYNCIO, format!("exec python3 server.py {at} {ASYNCIO}")),
        ];
        let processes = commands.map(|(port, script)| {
            let name = format!("server-{family}-{port}");
            let mut command = Command::new("bash");
            command
                .args(["-euc", &script.replace("$port", &port.to_string())])
                .current_dir(&folder);
            Process::start(&hosts.b, &hosts.logs, &name, &mut command)
        });
        for port in [NGINX, REDIS, IPERF, POSTGRES, SSH, ASYNCIO] {
            let at = SocketAddr::new(at, port);
            // On its own host nobody intercepts.
            let answers = || hosts.b.enter(|| TcpStream::connect(at)).is_ok();
            wait_until(&format!("a server at {at}"), LIMIT, answers);
        }
        Self { at, folder, _processes: processes.into() }
    }

    /// Asks a server at a port that nobody intercepts.
    pub(super) fn ask_aside(&self, hosts: &Hosts, client: &Host, expected: &str) {
        let heard = self.run(hosts, client, "curl-aside", &self.curl(ASIDE));
        assert_eq!(heard.trim(), expected);
    }

    fn curl(&self, port: u16) -> String {
        let at = SocketAddr::new(self.at, port);
        format!("curl --silent --show-error --fail --max-time 20 http://{at}/")
    }

    fn run(&self, hosts: &Hosts, client: &Host, name: &str, script: &str) -> String {
        let mut command = Command::new("bash");
        command.args(["-euc", script]).current_dir(&self.folder);
        // Each run has a log of its own.
        let name = format!("{name}-{}", if self.at.is_ipv6() { 6 } else { 4 });
        run(hosts, client, &name, LIMIT, &mut command).expect_success(&name)
    }
}

/// Lets each program of `client` talk to its server, which must be called from `expected`. Returns
/// how many connections that takes at least.
pub(super) fn ask_all(hosts: &Hosts, client: &Host, servers: &Servers, expected: &str) -> u64 {
    let at = servers.at;
    let ask = |name: &str, script: String| servers.run(hosts, client, name, &script);
    assert_eq!(ask("curl", servers.curl(NGINX)).trim(), expected, "curl");
    let said = ask("redis", format!("redis-cli -h {at} -p {REDIS} client info"));
    let colon =
        if at.is_ipv6() { format!("addr=[{expected}]:") } else { format!("addr={expected}:") };
    assert!(said.contains(&colon), "redis: {said}");
    let said = ask(
        "redis-benchmark",
        format!("redis-benchmark -h {at} -p {REDIS} -n 5000 -c 8 -q -t set,get"),
    );
    assert!(!said.to_lowercase().contains("error"), "{said}");
    ask("iperf3", format!("iperf3 -c {at} -p {IPERF} -n 64M"));
    let log = fs::read_to_string(servers.folder.join("iperf3.log")).expect("it has a log");
    assert!(log.contains(&format!("Accepted connection from {expected},")), "{log}");
    let question = "select inet_client_addr()";
    let said =
        ask("psql", format!("psql -h {at} -p {POSTGRES} -U postgres -tA -c '{question}' postgres"));
    assert_eq!(said.trim(), expected, "psql");
    let options = "-o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null";
    let said = ask(
        "ssh",
        format!("ssh -F none -i client_key {options} -p {SSH} root@{at} 'echo $SSH_CLIENT'"),
    );
    assert_eq!(said.split(' ').next(), Some(expected), "ssh");
    let said = ask("asyncio", format!("python3 client.py {at} {ASYNCIO}"));
    assert_eq!(said.trim(), expected, "asyncio");
    // curl, redis, its benchmark, two of iperf3, psql, ssh, twenty of asyncio.
    1 + 1 + 8 + 2 + 1 + 1 + 20
}

const POSTGRES_SCRIPT: &str = r#"
    bin=$(ls -d /usr/lib/postgresql/*/bin | tail -1)
    folder=$(mktemp -d)
    chown postgres $folder
    cd $folder
    setsid sh -c "tail --pid=$$ -f /dev/null; rm -rf $folder" &
    as() { setpriv --reuid=postgres --regid=postgres --clear-groups $@; }
    as $bin/initdb --pgdata=data --auth=trust --no-sync >&2
    echo 'host all all all trust' >> data/pg_hba.conf
    as setpriv --pdeathsig KILL $bin/postgres -D data -p $port -k $folder -h $at -c fsync=off &
    wait $!
"#;
const SSH_SCRIPT: &str = r"
    rm -f host_key* client_key*
    ssh-keygen -q -t ed25519 -N '' -f host_key
    ssh-keygen -q -t ed25519 -N '' -f client_key
    mkdir -p /run/sshd
    exec /usr/sbin/sshd -D -e -f /dev/null -h $PWD/host_key -o ListenAddress=$at -o Port=$port \
        -o AuthorizedKeysFile=$PWD/client_key.pub -o StrictModes=no -o PermitRootLogin=yes \
        -o UsePAM=no -o PidFile=none
";
/// Tells each client its address, and sends back what it sends.
const SERVER: &str = r#"
import asyncio, sys
async def serve(reader, writer):
    writer.write((writer.get_extra_info("peername")[0] + "\n").encode())
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
async def main():
    server = await asyncio.start_server(serve, sys.argv[1], int(sys.argv[2]))
    await server.serve_forever()
asyncio.run(main())
"#;
const CLIENT: &str = r#"
import asyncio, os, sys
async def one(size):
    reader, writer = await asyncio.open_connection(sys.argv[1], int(sys.argv[2]))
    assert writer.get_extra_info("peername")[0] == sys.argv[1], writer.get_extra_info("peername")
    name = (await reader.readline()).decode().strip()
    sent = os.urandom(size)
    writer.write(sent)
    writer.write_eof()
    assert await reader.read() == sent
    writer.close()
    return name
async def main():
    names = await asyncio.gather(*(one(50_000 * i + 1) for i in range(20)))
    assert len(set(names)) == 1, names
    print(names[0])
asyncio.run(main())
"#;
