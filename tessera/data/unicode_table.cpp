// Which characters are letters, numbers and so on, for cutting texts as Hugging Face's library does. Made by scripts/unicode_table.py;
// don't change it by hand.
#include "tessera/data/character_set.h"

namespace tessera::data {
namespace {

// clang-format off
constexpr NamedCharacters kAll[] = {
  {"lu",
   "65z101wagGa*54ba*14ba*45ba*3cbaaabacbdabaccbaba*4baabaabacaaabcagabababa*14ba*16babaaca*57gbabbaada*7 289aaaca"
   "hafaacaaabaqaiIabcca*22eabaabbYVa*32ia*53ba*11ba*94bL2889Laaea722 86 2195afQbc320a*148ia*96ihhfjh*3fka*6hh72dl"
   "dldlekd262adaccbcbacefa*5dbdjbea61a2684VVaacba*5daabahca*97haaada31053a*44sa*26 135a*12ca*60ja*3ba*7daaabaaaca"
   "*19eaea*14daaabcaea*6xa22315z1221N136J156kaoagab1770Y157v2874F21888F26016z*5aabbabbbdahzzzbadbhagAbadaeaacgAz*"
   "10DyGyGyGyGyGa4405H"},
  {"ll",
   "97z58aOxaha*54ba*14ba*45ba*3cbaaabacbdabaccbaba*4baabaabacaaabbbcfababa*15ba*16bbaaaca*57gbabbaada*7 69aA193aa"
   "acaccraAIabcca*22eaababbYVa*33ia*52ba*11ba*95VO2887Qbc760f2178iaa117R63maH102a*147ia*96ihfjh*3fjh*3nbh*5eabfac"
   "cabhdbbhhjcab274acbcaAadadabbhdda53a2731Vaacba*5daabafea*97bgaaadalLaaea30995a*44sa*26 135a*11ca*62ha*3ba*8daa"
   "abaaca*19eaea*14daaabaca*10zaca821Qeig80 20288gle1065z1229N136J155kaoagab1795Y125v2874F21888F26010zzgarzzzdaaa"
   "gakz*16BByafzyafzyafzyafzyafaa1844jatff2551H"},
  {"lt",
   "453ababaLa7573h*4laoaUa"},
  {"lm",
   "688rdlnegaaa133aea478a230a164b269bdaEaiaca160a167a1236a127a565a1754a107a611a464f174 63maHK689amapm3039b241a191"
   "a469aQeea97b93c28438a1250f270a114aBb121i80awa105ccb469ava137a108aub103dia21510aSb2016faPai1427aFa24016d508cNb5"
   "50m64baa16396dagab12337 62 201g941a1119a"},
  {"lo",
   "170aoa256add208a827AddSFajIba99aaxbjcbapaaDC89kaxGuvPygkexafqO59 54caragjpodhbbbvagaacdcapambacnbjahfdbbvagaba"
   "babEdaascpiacavagabaecaraobwakhbbbvagabaecaDbacoaqaafccadcbaaabcbccclvaZhacawapcazcbabbDadhacawajaecaEbabobqia"
   "caObapaechcxfercxaiaabg58Vablf59baaaeaxaaajabiabewdFa63haJAe115Qtapfddcacbgcdmla113 329adbgaaadbOadbGadbgaaadb"
   "oa57adb67Kp113 620bqaze75fhgrmsnrnmacoZNa67Ia53gebHaae70jEWDbekRdz54wi53 176Uqh54DmbjRzJOcjD113dafabca1082d306"
   "3 56xwigagagagagagagag551a53ad86haa90daeQa94qFVp512 6592 64 21013a1143 67Nh268dpjb66aW70 169a103acgacadawCZnX6"
   "2fcaabkBjwyCgUSebijeaOwcahtpafcacXaacbbebaaaxbckganfbfbfigag145IC11172lwdW8452 366b106 67aajamaeaaababa108G363"
   "r64b54Nl116ea135 105jaSbEcfbfbfbcIlazasabaobnH123 389CcWUFmtahfLjDbJdh128 78 98NhZ92Zl311ivjh152fbaaRabcabwjwi"
   "E65sabjvjz70 56fb64aodacaCPCcCIhaBA54jvjsmr110 73 183JLdaa304Pfbpc59CjahvPrTuAwl53 57bbamSFyzJCabahIcalVnduaaa"
   "Iraysb63gaaadaoajgULhbbbvagabaecaraleDjaabaaLaayaaaR53rdtcDVtbaa184UOdJVta59Qma71AKg185R211hbabhabaxoaaa94hbMp"
   "aaaBajNgauakTsar73 199GEiaKqaWD112gabaLuayfabaFna327soaamaH124a79 922 230 196 2636 97o1072qfy3995e583 6841D176"
   "2 569gEq79qDrVYues435N405 75ea175 6136h1238Oj8951 291oaCcbandh396 2308 107emcigj8816a501SGa321DrR484A229Dba495"
   "gadabaoa197 1339daAabaabaajada*3fada*5cabaaba*9baabdagadadaaajaqecaeaq4420 42720F4154f222b5762n7473o622 2466 5"
   "42 1506 4939e4192"},
  {"mn",
   "768 112 275e265Saaababaa72kVupa101gbfbbadIaDA91k58iiaxdaiacaeQc59iPxaF55aaadhdacgjbCa58addhatbzabb57adbdbbccaD"
   "bcakb57adeabdatbvfaa58abaadhagbkbDa61alaXaca55aacecadgbkbCa58abafaebtbBb57bddhatbCa72agcaa90abglh98abikg73bAa*"
   "4 55naeabekaJia102dafabbbybdcpdmabbfaoa703c946cCbDbDb64baghabkiaScaa117bHa118cdbiafc219bba58aaga*3bhfjbaVnapWd"
   "VaaeaaeaNilbFdbbac56aabcaac58hbb152camagdafacb198 64 720mdacl3070c141a96F554d107b30164adjFb80b272acadaybea151b"
   "zrmaLhykTcVabdbbMa67fb*3lahaUaYaacbbebaaPbha238abada20272a737ppp973a226a149e1670cabedNcda165b573d65e317b79d70k"
   "Wd123a54oOabbjcWdbbga61cJeah62albZijdba95cbaabfaba157achub57bcaKgce70fma*4nb85hbcaawa84faadbab238dfbabAb85hbaa"
   "b106aaabfaa101aaabdae259iab256baada144dbbdaFjNfbdhaifbcTmab406gafaa82vbgabab122fcaabagaa72bcaaa347bkbZeeaaawa5"
   "349afo11464lcc2496e59g1048a63d81a19640b4705Tbw544cqhbgDd148c1979 55dXhanaveao1360gaqbgabae100a160g375a61d508d2"
   "54b736g109g792501 240"},
  {"mc",
   "2307a55abchdabXb58cfbbbjaQa58c66a58chaab53b58aaafbbbja102babccacjaOc61d61b58aaebbabibBanb58cecacjaPb75cfhrb330"
   "b63a171bdafabbybjcbgubbfbajc1656aDa129aghab346dbcdbaf224b58aaaiaabhf145aVaeaaeab61aDadbba60abcaacbVhhb171aua49"
   "18b30707bba88bXp142bUaVbdbbc110bbbxaSaaa109abbea237bababaa25619aaa127aScdb115axb59aVcibma93ccbaa170cEb58badbbb"
   "ciajb84cgabaadabaa101chbca106cfaadba237cfdba113chbaa109aabfa103aabda261cia247fabdabaaa142chdda84aCb62a407ana10"
   "6agaba213edbaa350blaVbhbaa16872c3620 55 104b24947bff"},
  {"me",
   "1160b5684a1566dac34187c"},
  {"nd",
   "Vj1574j134j198j412j118j118j118j118j118j118j118j118j118j96j118j70j278j70j1862jLj300j128j166jfj182j86j134jfj3527"
   "0j678jLj198jvj86j406j21270j1414j2182jfj796j128j60j144j278j342j118j374j102jft76j422j102j662j86j246j70j422j16854"
   "j2342j86j134j534j24438j2772X2368j422j502j247j853j4758j"},
  {"nl",
   "5870c2671Ibd3710ayinc30379j23120 53 460aha134e8234 111"},
  {"no",
   "178beabc2357f376f120c133g217gqi433j1077t1139j480a1685acffj198pOa726 60 78v630D1385a1172d138jDhaoFjMo30064f2273"
   "7S65dqb341AJd1332hygMi75evf160bbpbT64iZbDc75e104hxhOg330f352E158jPd112g134t379t1349b430i871s851u19334g798w2564"
   "1tlt108y5454i929 59acad76Sao962m"},
  {"pc",
   "95a8159bsa56798bxc239a"},
  {"pd",
   "Sa1372aYa3649a1029a2057f3585abaEbdaBa446asa111a52624bKaja169a3680a318a"},
  {"ps",
   "NaXaEa3774aaa1886a2430acaLa55aoa634aaaDa1086a*12 80aFa*8 404a*20 64aaaGa1061a*6yara*6 428a*8ca*6ba52513a215aCa"
   "*14caqa*4 170aXaEacaba"},
  {"pe",
   "OaYaEa3773aaa1886a2473a55aoa634aaaDa1086a*12 80aFa*8 404a*20 64aaaGa1061a*6Ra*6 428a*8ca*6bb52510a217aCa*14caq"
   "a*4 170aYaEababa"},
  {"pi",
   "171a8044abbbaya3528aaadabaoaca"},
  {"pf",
   "187a8029acaBa3528aaadabaoaca"},
  {"po",
   "Gcacba*3bjbcbAa68aeanbga702aha466fOa54ababaRbtbabmaac74d102aQn233c54oEa261bja140a120a121a390ala367a90ajb168oaa"
   "112a74edb111f171a612i773a124c71b157cacKfad313b216b128gaf160bjgBc124d59e62b64hka834bhhhibdbcckaaaj3226dab112a14"
   "3bdcbabiabaabbjeajbdaaambc428c57a189a29698b269c99aja115f380d86bNcaaWbUa97mpb124d126bpb249a21028gbavatbbdccadgc"
   "faab149cacba*3bjbcbAaJabb410c668aVa414a743a199aEa272iLa112g66g89d952eRd189g109bad126dVb79ddamaac88f107a298bab1"
   "14ejbaa104a250w105cBm76a130c252a264c155a92h83cae93j215a95ePb645b74m175a1136e2940b14971b133a65eha552c295d327a19"
   "644a7655e2931a862b"},
  {"sm",
   "Qapc61aaaSadaKaEa766a527c6715amaMcmc139aMefa68eebdababagaEbbaaaE268Fb90aDyNf469aia54h111a336ebEjp256 131v63dFb"
   "258Vubf53212a824aac164apc61aaa131afd3489b51505ayaEayaEayaEayaEaya5932b"},
  {"sc",
   "Ja125d1257a123a498b498bga245a263a581a2459a2244G34679a21955a108a154a219bcb8182d49950a2480a"},
  {"sk",
   "94aaa71afadaca521dlnegaaaq117anb1282a5940aackcmcmcmb4252b30307wib103b976anb20550q891aaa162a62487e"},
  {"so",
   "166abadaaa977a266b127b206ajasb247a515a373a130faa132a207aOa391coaacbfta*4 133hafabed197b752j723a722a157H353jii1"
   "411badabjaabffa*5dakbnaabaa58biebdababagaEbbaaaE268hdtbgb81aDyNf72vk81 78v183aia54h111a248RR64 256 512VubfMbFa"
   "105 229f357bTza89l214zpdamblaubfb336bdjFLiapEkDhaoFjMo320 6592 64 22160 55 865djbaa573c21190p127aSc484acadbmb3"
   "13i57qbcamcaUS1658b591a3190a2197hdq19274dea20822a3939 240p436 156 116 60 246jMb60ecvbgDd61u66ca186 87 1193 512"
   " 55dXhanab1736a2908a129a721Rd100loboaoaKw161 56CmRdigbnf154 251e728dqcmc119d95fldaold56hjfNhDbldb62 340lnbmcje"
   "56gobkfig147a92"},
  {"zs",
   "Fa127a5599a2431kJaUa4000a"},
  {"zl",
   "8232a"},
  {"zp",
   "8233a"},
  {"cc",
   "0F95G"},
  {"cf",
   "173a1362fva192aWa384b80a3883a2044ezeWeaj56975a249c4289aoa9058p34912d5327h798342aD96"},
  {"co",
   "57344 6400 919296 65534b65534"},
  {"alphabetic",
   "837aCm576naaababaa72kVmagpa101gddbbdaIaDp102k101bciacad106a60lcgft54bboabecjbCc58gb*3jajbCc58edbbbdaDbcakc58ha"
   "cabubvcdc58gb*3ibjbDa59eccacjaNe57gacachbkbCc58gacachbkboald58gacacjajbCc75faaahrb61abgra99abfabpa163sikaJ110l"
   "aabdwddcacbgcdmlaajd1652bDbDbDb66s188bHa118ldi222e57jbt74bkcWeVo60cDibb57kXs412H1729Z2294F30836hHb354ahawe88bX"
   "paa57aLeBlSdVlKa67nlahbScXaacbbeaReea237h20275a2135e1670cabed788d65a321b79a259c53nSbkcSiia61cJlrb57cVmnb92ibaf"
   "aba157jwd58gb*3jajb84iaabaadab103mac106r237gbgCb82oaa106k103n257m247fabbbcaaa142gbfdaBjPeadrkTn407hag83van122f"
   "caabacaaca66eabad348dibaaVgcc16861q3616aa55gd93b19628a9057gaqbgabae100a2231a2024zfzfz"},
  {"uppercase",
   "8544p838z117856zfzfz"},
  {"lowercase",
   "170aoa501igbDe96aZa3457a3119 63maHK689amapm211p848z1938b31262b210a129ccb866dia23574abcaPai55413 62"},
  {"arabic",
   "1536eafanacaFajkza108aH80V240Eabe75aC62032 115p363b80b54gaFp112ea135 3939E67c55d57088daAabaabaajada*3fada*5cab"
   "aaba*9baabdagadadaaajaqecaeaqZb"},
  {"armenian",
   "1329LbXbc62851e"},
  {"bengali",
   "2432dahbbbvagaacdbibbbdhadbaeby"},
  {"cyrillic",
   "1024 133b169 5968k160a76a4199F30784 96 22414b57856 62Ga"},
  {"devanagari",
   "2304 81dobz40800F29184j"},
  {"georgian",
   "4256LaaeabQad2960Qbc4160Laaea"},
  {"greek",
   "880dacbdaada*3caaata63np6438eXede84a320vbfbLbfbha*6Eb53aoanbfasbcai295a35390a21978 79qa53343 70"},
  {"han",
   "11904za89l214Uaaayind964 6592 64 20992 22784 366b106 29960blb36878 42720F4154f222b5762n7473o622 2466 542 1506 "
   "4939e4192"},
  {"hangul",
   "4352 256 7726b257 94 113E65E30433C643 11172lwdW10148Ecfbfbfbc"},
  {"hebrew",
   "1425 55hAdf62760zaeaaababaj"},
  {"hiragana",
   "12353 86fc98145 287raCc16557a"},
  {"katakana",
   "12449 90bc240p208Ua88 52238jaS45138dagabaa287cXand"},
  {"khmer",
   "6016 94bjfj486F"},
  {"lao",
   "3713baaaeaxaaawbeaaagajbd"},
  {"latin",
   "65zfzUaoaewaEa449Me6683LfWedema70 65 256 369amapm141bfaAaqO2775F31394 102c67bbaaahun816Qaiad20374g1050zfz2085f"
   "aPai55109Eff"},
  {"myanmar",
   "4096 160 39232E97F27728t"},
  {"tamil",
   "2946bafccadcbaaabcbcccldeccadbafanu70597Xma"},
  {"telugu",
   "3072macawapbiacadgbacbabdbjgi"},
  {"thai",
   "3585 58eB"},
  {"cs",
   "55296 2048"},
};
// clang-format on

}  // namespace

const std::span<const NamedCharacters> kNamedCharacters = kAll;

}  // namespace tessera::data
